"""Data: datasets as numbered rows, and batches of them."""
