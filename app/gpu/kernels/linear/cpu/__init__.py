"""Dense layers of CPUs: kernels in Numba over weights in panels, and oneDNN's for half types."""
