"""What has to be seen on a GPU, in ten minutes: each part of the CUDA path against its target."""
