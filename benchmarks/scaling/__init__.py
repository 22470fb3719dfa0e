"""The parts of ``benchmarks/scale_out.py``: kills, two hosts, speed, memory and rates."""
