"""The baseline server: Transformers' `generate` behind OpenAI's completions, and nothing that makes it clever.

It runs in Djinn's own environment, or in one with PyTorch, Transformers, FastAPI, uvicorn and Ray.
"""
