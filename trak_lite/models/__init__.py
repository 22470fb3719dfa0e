"""Models: checkpoints, sharded models, and a caller's model that is given back as it was."""
