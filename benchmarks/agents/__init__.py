"""Eighty agents that think between their turns, on equal KV memory: Djinn with each policy, and vLLM."""
