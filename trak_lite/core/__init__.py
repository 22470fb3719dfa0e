"""What every room uses: devices, random numbers, validation, progress, caches of models, the version."""
