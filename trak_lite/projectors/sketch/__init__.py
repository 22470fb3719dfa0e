"""CountSketch, in torch and in Triton."""
