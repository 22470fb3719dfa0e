"""Benchmarks: run by hand, never by the tests; summaries are kept under results/."""
