"""What the doctor asks of PyTorch and of the NVIDIA driver."""
