"""Tensors on the wire: safetensors from and to NumPy arrays, also of bfloat16, which NumPy does not have.

Only this file uses NumPy, which is several times as large as all else that the client needs. It may be missing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, TensorSpec, deserialize, serialize

from client.errors import InvalidRequest

HAS_NUMPY = find_spec("numpy") is not None
if TYPE_CHECKING or HAS_NUMPY:
    import numpy as np
    import numpy.typing as npt

    ArrayLike = npt.ArrayLike
    FloatArray = npt.NDArray[np.floating[Any]]
    Numbers = npt.NDArray[Any]
else:
    ArrayLike = FloatArray = Numbers = Any

READ_AS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""What the bytes of each of safetensors' types are; those of bfloat16 are the upper halves of float32's."""
WRITE_AS = {"float32": "<f4", "float16": "<f2", "bfloat16": "<f4"}
"""What values are first rounded to, by PyTorch's name of the type that they are sent in."""

BFLOAT16_NAN = 0x7FC0


def load(body: bytes) -> tuple[dict[str, FloatArray], dict[str, str]]:
    """The tensors of a safetensors file and its metadata; bfloat16 is widened to float32, which loses nothing.

    Raises ValueError if it is not such a file, or has a type of numbers that Djinn does not send.
    """
    _require_numpy()
    try:
        tensors = {name: _to_array(**found) for name, found in deserialize(body)}
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    except KeyError as error:
        raise ValueError(f"a tensor of type {error}") from error
    header = body[8 : 8 + int.from_bytes(body[:8], "little")]
    metadata: dict[str, str] = json.loads(header).get("__metadata__", {})
    return tensors, metadata


def dump(name: str, values: ArrayLike, dtype: str) -> bytes:
    """A safetensors file with one tensor in `dtype`: each value becomes the nearest there is, ties to even, and
    infinite if it is too large. Raises `InvalidRequest` for values that are not real numbers.
    """
    _require_numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise InvalidRequest(f"{name} is not an array: {error}") from error
    if array.dtype.kind not in "fiu":
        raise InvalidRequest(f"{name} must be an array of real numbers, not of {array.dtype}")
    with np.errstate(over="ignore"):
        wire = array.astype(WRITE_AS[dtype], order="C")
    if dtype == "bfloat16":
        wire = _to_bfloat16(wire)
    spec = TensorSpec(dtype=dtype, shape=wire.shape, data_ptr=wire.ctypes.data, data_len=wire.nbytes)
    return bytes(serialize({name: spec}))


def joined(arrays: Sequence[FloatArray]) -> FloatArray:
    """`[rows, ...]`, one behind the other; a last dimension that is shorter than others' is filled with zeros."""
    most = max(array.shape[-1] for array in arrays)
    filled = [np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, most - array.shape[-1])]) for array in arrays]
    return np.concatenate(filled)


def _require_numpy() -> None:
    if not HAS_NUMPY:
        raise ImportError("activations, captures and vectors are NumPy arrays: pip install 'djinn-client[numpy]'")


def _to_array(dtype: str, shape: list[int], data: bytearray) -> FloatArray:
    array = np.frombuffer(data, READ_AS[dtype]).reshape(shape)
    return array if dtype != "BF16" else (array.astype("<u4") << 16).view("<f4")


def _to_bfloat16(array: Numbers) -> Numbers:
    """The upper half of each float32, rounded to nearest even. Adding could make a NaN infinite."""
    bits = array.view("<u4")
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(array), BFLOAT16_NAN, rounded).astype("<u2")
