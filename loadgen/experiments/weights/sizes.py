"""Sizes: as the command line has them, and of a model, read from its files."""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from safetensors import SafetensorError, safe_open

from loadgen.errors import LoadgenError
from loadgen.peers.dtypes import ELEMENT_BYTES

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def parse_bytes(text: str) -> int:
    """`90MiB` or `90000000` in bytes. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]i?B)?", text)
    if found is None or not (size := int(float(found[1]) * UNITS[found[2] or ""])):
        raise ValueError(f"must be bytes, such as 90MiB, not {text!r}")
    return size


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes, or a share of the model's."""

    text: str

    def __post_init__(self) -> None:
        self.of(1 << 40)

    def of(self, model_bytes: int) -> int:
        """Bytes of it, of a model that has so many. Raises ValueError for what is neither bytes nor a share."""
        if re.fullmatch(r"[1-9]\d*/[1-9]\d*", self.text) is None:
            return parse_bytes(self.text)
        if (share := Fraction(self.text)) >= 1:
            raise ValueError(f"must be less than the whole, not {self.text!r}")
        return int(model_bytes * share)


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """`total` bytes of a model's weights, of which a pass over any tokens needs `per_pass`: all but the embedding, of
    which it needs some rows, unless that is the output projection too.
    """

    total: int
    per_pass: int


def read_model_bytes(folder: Path, dtype: str) -> ModelBytes:
    """Of the safetensors in a Transformers folder, as elements of `dtype`. Raises `LoadgenError`."""
    sizes: dict[str, int] = {}
    for path in sorted(folder.glob("*.safetensors")):
        sizes |= {name: count * ELEMENT_BYTES[dtype] for name, count in _count_elements(path).items()}
    if not sizes:
        raise LoadgenError(f"{folder} has no safetensors")
    total = sum(sizes.values())
    is_tied = not any(name.endswith(HEAD) for name in sizes)
    looked_up = 0 if is_tied else sum(size for name, size in sizes.items() if name.endswith(EMBEDDING))
    return ModelBytes(total, total - looked_up)


def _count_elements(path: Path) -> dict[str, int]:
    """Of each tensor."""
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: math.prod(file.get_slice(name).get_shape()) for name in file.offset_keys()}
    except (OSError, SafetensorError) as error:
        raise LoadgenError(f"{path} is no safetensors file: {error}") from error
