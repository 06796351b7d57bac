"""Built-in verifiable tasks, and the tiny model that learns them on a CPU."""
