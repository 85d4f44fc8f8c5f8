"""Attention of CPUs: kernels in Numba that read KV where it is in the pool."""
