"""Masks: projections that select some of the coordinates."""
