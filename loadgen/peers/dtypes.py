"""Types of elements, by the names that Djinn and Transformers give them."""

from __future__ import annotations

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
