"""Random numbers of projections; they depend only on seed, model_id, parameter and coordinates."""
