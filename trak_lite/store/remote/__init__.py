"""The store in an object store: the same tables, committed by conditional requests."""
