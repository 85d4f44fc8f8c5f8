"""The baseline server: Transformers' `generate` behind OpenAI's completions, and nothing that makes it clever."""
