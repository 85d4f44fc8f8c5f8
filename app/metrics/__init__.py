"""Prometheus metrics of turns and of memory, also under the names of vLLM."""
