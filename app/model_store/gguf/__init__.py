"""GGUF files: what Transformers can read of one becomes a folder, and its tensors are found for reading in place."""
