"""Dense layers of CUDA devices: kernels in Triton, and layers whose weights take 8 bits each."""
