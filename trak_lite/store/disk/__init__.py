"""Feature store on disk: zarr arrays, staged chunks, commit records, checks and repair."""
