"""An exported session, read: safetensors with the tensors `token_ids`, `about`, `kv` and `sha256`."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from loadgen.errors import LoadgenError

ELEMENTS = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
"""What NumPy calls the element types that KV comes in; bfloat16 is not one of NumPy's own."""

AXES = 6
DIGEST_BYTES = 32

KVArray = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class SessionFile:
    """What the file holds, `content` being all of it.

    `kv` starts at byte `kv_start`: [blocks, layers, 2 (keys, values), kv_heads, block_tokens, head_dim], with the KV of
    the first `computed_tokens` tokens; what follows them in the last block is zero.
    """

    content: bytes
    computed_tokens: int
    dtype: str
    kv: KVArray
    kv_start: int

    @property
    def full_blocks(self) -> KVArray:
        """The blocks without zeros at their end."""
        return self.kv[: self.computed_tokens // self.kv.shape[4]]

    def with_blocks(self, blocks: KVArray) -> bytes:
        """The file with these as its full blocks, and a checksum that fits: the last tensor, over all bytes before."""
        changed = bytearray(self.content[:-DIGEST_BYTES])
        content = np.ascontiguousarray(blocks).tobytes()
        changed[self.kv_start : self.kv_start + len(content)] = content
        return bytes(changed) + hashlib.sha256(changed).digest()


def read_session_file(path: Path) -> SessionFile:
    """Raises `LoadgenError` if it is no such file, or has no KV."""
    content = path.read_bytes()
    try:
        start = 8 + int.from_bytes(content[:8], "little")
        header: dict[str, Any] = json.loads(content[8:start])
        found, computed = header["kv"], int(header["__metadata__"]["computed_tokens"])
        first, end = (start + offset for offset in found["data_offsets"])
        kv = np.frombuffer(content[first:end], ELEMENTS[found["dtype"]]).reshape(found["shape"])
    except (ValueError, LookupError, TypeError) as error:
        raise LoadgenError(f"reading the exported session failed: {error!r}") from error
    if kv.ndim != AXES or not kv.size:
        raise LoadgenError(f"the exported session has KV of shape {list(kv.shape)}: nothing to measure")
    return SessionFile(content, computed, found["dtype"], kv, first)
