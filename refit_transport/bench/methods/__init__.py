"""The transports that a benchmark compares: ours by plan, and what users would pick instead."""
