"""Two-sided projections: one small matrix for inputs and one for output gradients."""
