"""Plan of a model's pass: the sample to which each row of each tensor belongs."""
