"""Ray: placement, trainer and engine actors, coordination."""
