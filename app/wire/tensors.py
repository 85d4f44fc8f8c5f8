"""Tensors as safetensors files, and the checks that a client's tensors go through. Nothing that is read is executed."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, deserialize, safe_open

from app.domain.breakpoints import Bytes, TensorData, TensorParts
from app.domain.errors import FieldOutOfRange, MalformedRequest

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Safetensors' names and PyTorch's."""
WRITTEN = {"float32": ("F32", 4), "int32": ("I32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}
"""PyTorch's names of the types of `file_parts`, with Safetensors' names and the bytes of a number."""
EXPONENTS: dict[str, tuple[str, int]] = {
    "float32": ("<u4", 0x7F80_0000),
    "bfloat16": ("<u2", 0x7F80),
    "float16": ("<u2", 0x7C00),
}
"""An integer of the same width, and the bits of the exponent in it: all set in infinities and NaN (IEEE 754)."""


def file_parts(tensors: Mapping[str, TensorParts], metadata: Mapping[str, str]) -> list[Bytes]:
    """A safetensors file as parts: its header, and then the bytes of the tensors, without a copy
    (https://github.com/huggingface/safetensors#format). `tensors` of one dtype are laid out by name.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    parts, first = list[Bytes](), 0
    for name in sorted(tensors, key=lambda name: (-WRITTEN[tensors[name].dtype][1], name)):  # so that all are aligned
        tensor = tensors[name]
        header[name] = {
            "dtype": WRITTEN[tensor.dtype][0],
            "shape": tensor.shape,
            "data_offsets": (first, first + tensor.nbytes),
        }
        parts += tensor.parts
        first += tensor.nbytes
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()  # as the library writes it
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little") + text, *parts]


def write_file(tensors: Mapping[str, TensorData], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file as `file_parts` lays it out."""
    parts = {name: TensorParts(each.dtype, each.shape, (each.data,)) for name, each in tensors.items()}
    return b"".join(file_parts(parts, metadata or {}))


def read_one(content: bytes, *, param: str) -> tuple[str, TensorData, dict[str, str]]:
    """The only tensor of a safetensors file with its name, and the file's metadata.

    Raises `MalformedRequest` unless it is such a file, `FieldOutOfRange` unless it holds one tensor of a dtype that is
    known here, whose elements are all finite. `param` names the tensor.
    """
    try:
        found = deserialize(content)
    except SafetensorError as error:
        raise MalformedRequest("the body is not a safetensors file, or not a whole one", param="body") from error
    if len(found) != 1:
        raise FieldOutOfRange.at(param, f"the file must hold 1 tensor, not {len(found)}")
    ((name, entry),) = found
    if entry["dtype"] not in DTYPES:
        raise FieldOutOfRange.at("dtype", f"{entry['dtype']} must be one of {', '.join(DTYPES)}")
    tensor = TensorData(DTYPES[entry["dtype"]], tuple(entry["shape"]), bytes(entry["data"]))
    if (wrong := first_infinite(tensor)) is not None:
        raise FieldOutOfRange.at(param, f"element {wrong} is not finite")
    # The library checks the metadata but does not give it out: the header is JSON after its length in 8 bytes.
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return name, tensor, header.get("__metadata__") or {}


def read_arrays(path: Path, *, param: str) -> dict[str, NDArray[np.float32]]:
    """All tensors of a safetensors file as float32. Raises `MalformedRequest` unless it is such a file,
    `FieldOutOfRange` for a dtype that is not known here. `param` names the file.
    """
    try:
        with safe_open(path, framework="numpy"):  # checks the header against the file
            pass
    except (OSError, SafetensorError) as error:
        raise MalformedRequest.at(param, "it is not a safetensors file, or not a whole one") from error
    with path.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    found, data = {}, np.memmap(path, np.uint8, "r")
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            field = f"{param}.{name[:100]}"
            raise FieldOutOfRange.at(field, f"{entry['dtype']} must be one of {', '.join(DTYPES)}")
        first, end = entry["data_offsets"]
        content = data[8 + size + first : 8 + size + end]
        found[name] = to_float32(TensorData(DTYPES[entry["dtype"]], tuple(entry["shape"]), content.tobytes()))
    return found


def check_array(array: NDArray[np.float32], shape: tuple[int, ...], *, param: str) -> None:
    """Raise `FieldOutOfRange` unless the array has that shape, and nothing in it is infinite or NaN."""
    if array.shape != shape:
        raise FieldOutOfRange.at(param, f"the shape must be {list(shape)}, not {list(array.shape)}")
    if not (finite := np.isfinite(array)).all():
        raise FieldOutOfRange.at(param, f"element {int(np.argmin(finite))} is not finite")


def first_infinite(tensor: TensorData) -> int | None:
    """The first element that is not a finite number; None: all are."""
    integer, exponent = EXPONENTS[tensor.dtype]
    wrong = (np.frombuffer(tensor.data, integer) & exponent) == exponent
    return int(wrong.argmax()) if wrong.any() else None


def to_float32(tensor: TensorData) -> NDArray[np.float32]:
    """The elements, in the tensor's shape. Every dtype known here fits into float32 without rounding."""
    if tensor.dtype == "bfloat16":
        flat = (np.frombuffer(tensor.data, "<u2").astype("<u4") << 16).view("<f4")
    else:
        flat = np.frombuffer(tensor.data, "<f2" if tensor.dtype == "float16" else "<f4").astype("<f4")
    return flat.reshape(tensor.shape)


def vector_of(values: Sequence[float] | NDArray[np.float32]) -> TensorData:
    """A float32 vector."""
    return TensorData("float32", (len(values),), np.asarray(values, dtype="<f4").tobytes())


def norm(vector: TensorData) -> float:
    """L2 length, computed in float64: squares of large float32 numbers would overflow."""
    return float(np.linalg.norm(to_float32(vector).astype(np.float64)))
