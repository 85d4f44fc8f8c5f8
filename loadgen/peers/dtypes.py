"""Types of elements, by the names that Djinn and Transformers give them."""

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
