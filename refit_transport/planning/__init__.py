"""From two descriptions to one plan, and from a plan to each rank's program. Pure."""
