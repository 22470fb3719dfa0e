"""Several processes on one run: ranks that know of each other, and rows shared through the store."""
