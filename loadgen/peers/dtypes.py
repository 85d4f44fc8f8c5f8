"""Types of elements, by the names that Djinn and Transformers give them."""

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
AUTO = "auto"
"""Each in its best type: Djinn and PyTorch in what this machine multiplies fastest, llama.cpp in a quantization."""
CHOICES = (AUTO, *ELEMENT_BYTES)
"""What a command line can ask for."""
