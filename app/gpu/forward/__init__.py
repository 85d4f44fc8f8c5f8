"""A planned step on the device: rows to logits, eagerly, as CUDA graphs or as CPU programs."""
