"""Gradient rules: from the inputs and output gradients of an operation to per-sample gradients."""
