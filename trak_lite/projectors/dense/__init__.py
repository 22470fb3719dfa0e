"""Dense projections: matrices of random signs or normal numbers, in torch, in Triton and by fast_jl."""
