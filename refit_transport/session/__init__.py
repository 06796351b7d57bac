"""Joins both sides, agrees on a plan, and runs each refit as a versioned transaction."""
