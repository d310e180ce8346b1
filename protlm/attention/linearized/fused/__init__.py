"""Linear attention in Triton kernels, for CUDA; features are never in memory."""
