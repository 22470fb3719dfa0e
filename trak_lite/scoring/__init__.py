"""Scoring: stored feature rows become scores, in tiles."""
