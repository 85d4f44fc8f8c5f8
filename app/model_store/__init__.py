"""Where models come from: the catalogue, folders, GGUF files, the Hugging Face hub and random weights."""
