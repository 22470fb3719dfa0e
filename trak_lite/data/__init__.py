"""Data: datasets as numbered rows, and their batches."""
