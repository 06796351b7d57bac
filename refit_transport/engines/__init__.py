"""What an inference rank holds, read from live objects."""
