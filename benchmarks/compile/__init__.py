"""The CUDA kernels compiled for devices that are not there: what each takes of a multiprocessor."""
