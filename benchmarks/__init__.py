"""Benchmarks. Run them by hand; tests do not. Results are stored in results/."""
