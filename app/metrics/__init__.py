"""Prometheus metrics of turns, connections and memory, also under the names of vLLM."""
