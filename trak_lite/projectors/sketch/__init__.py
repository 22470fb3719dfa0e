"""CountSketch in torch and Triton."""
