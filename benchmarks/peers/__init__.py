"""Djinn, vLLM's CPU build and Transformers' `generate`, on the same cores, model, prompts and load."""
