"""Featurizing: one pass over data gives feature rows and curvatures."""
