"""Products of CPUs: kernels in Numba that multiply weights in panels, whichever type they have."""
