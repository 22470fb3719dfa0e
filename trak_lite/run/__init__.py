"""A run: its settings, its workspace and the tables in it."""
