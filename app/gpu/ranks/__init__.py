"""Tensor parallelism: processes that each have a part of every layer and of every KV block, and follow the first."""
