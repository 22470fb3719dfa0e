"""Feature store in an object store; chunks are committed by conditional requests."""
