"""Numba kernels of a CPU, and how they are compiled and run."""
