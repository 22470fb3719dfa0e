"""The store on a disk: zarr arrays, staged chunks, commit records, checks and repair."""
