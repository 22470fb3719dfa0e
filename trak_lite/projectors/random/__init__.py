"""Random numbers of projections: a function of seed, model_id, parameter and coordinates alone."""
