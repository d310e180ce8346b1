"""Linear attention in Triton kernels, for CUDA; features are never in memory.

Only `selection` is imported without Triton.
"""
