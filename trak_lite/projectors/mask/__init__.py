"""Masks: projections that keep some of the coordinates."""
