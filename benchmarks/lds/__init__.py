"""The settings, the ground truth and the methods of ``benchmarks.lds.table``."""
