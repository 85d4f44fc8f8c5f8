"""Kernels of CPUs and GPUs: attention, products with weights, and what they are compiled with."""
