"""Plan of a hooked call: which rows of which tensors belong to which sample."""
