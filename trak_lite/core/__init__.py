"""What every room uses: devices, random numbers, files, JSON, digests, validation, progress, caches of models."""
