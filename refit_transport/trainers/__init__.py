"""What a trainer rank holds, read from live objects."""
