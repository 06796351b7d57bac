"""Wires run a program's exchanges."""
