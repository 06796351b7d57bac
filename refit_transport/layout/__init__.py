"""Regions, meshes and placements: which rank holds which part of a logical parameter. Pure."""
