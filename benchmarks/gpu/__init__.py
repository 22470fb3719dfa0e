"""What a GPU computes, and how fast: ``python -m benchmarks.gpu``."""
