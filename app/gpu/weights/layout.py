"""How a model's weights lie in runs of bytes, in memory and in a file. Nothing here does I/O.

    8 bytes    length of the header, little-endian
    header     JSON, padded to a page: each tensor's dtype, shape and place; `__metadata__` says what they belong to
    table.0    [rows, width]; and so on, each from a new page on
    bundle.0   U8 [nbytes], laid out as `BundleLayout` says; and so on, in the order of use

The file is a safetensors file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from app.gpu.device.hardware import dtype_name
from app.gpu.state.kv_header import LENGTH_BYTES, SAFETENSORS_DTYPES, encode_safetensors
from app.gpu.weights.arena import aligned

FORMAT = "djinn-weights"
VERSION = "3"
PAGE_BYTES = 4096
"""Bytes. Every bundle and table begins on a page of the file."""
_DTYPES = {name: known for name, (known, _) in SAFETENSORS_DTYPES.items()} | {"uint8": "U8"}

Write = Callable[[str, Sequence[Tensor]], None]
"""Stores the tensors of `bundle.<n>`, or that of `table.<n>`: once for each name. They are dense, on any device."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A dense tensor that lies `offset` bytes from the start of its bundle, or of a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor itself."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view(self, memory: Tensor) -> Tensor:
        """The tensor in `memory`, uint8, which must be aligned."""
        return memory[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True)
class BundleLayout:
    """The tensors of a bundle and its bytes, a multiple of `ALIGNMENT`."""

    pieces: tuple[Piece, ...]
    nbytes: int

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> BundleLayout:
        """The layout of dense tensors, on whatever device, `meta` included, one after the other."""
        pieces, end = [], 0
        for tensor in tensors:
            pieces.append(Piece(tuple(tensor.shape), tensor.dtype, end))
            end += aligned(tensor.nbytes)
        return BundleLayout(tuple(pieces), end)

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors in `memory`, `[nbytes]` uint8, which must be aligned: views."""
        return [piece.view(memory) for piece in self.pieces]


@dataclass(slots=True)
class WeightLayout:
    """The bundles of a model in the order of their use, and its tables `[rows, width]`."""

    bundles: list[BundleLayout] = field(default_factory=list)
    tables: list[Piece] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return sum(bundle.nbytes for bundle in self.bundles) + sum(table.nbytes for table in self.tables)

    def parts(self) -> dict[str, BundleLayout]:
        """By their names: the tables, each as a bundle of one tensor, then the bundles."""
        tables = [BundleLayout((table,), aligned(table.nbytes)) for table in self.tables]
        named = {f"table.{index}": table for index, table in enumerate(tables)}
        return named | {f"bundle.{index}": bundle for index, bundle in enumerate(self.bundles)}


def host_bytes(tensor: Tensor) -> memoryview:
    """The memory of a dense tensor on the host, flat; writing to it writes to the tensor."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


class UnusableFile(Exception):
    """The file is not the one that is wanted, or is damaged; the text is a sentence that says why."""


def sections_of(model: str, layout: WeightLayout) -> tuple[dict[str, Piece], int]:
    """Where each part is in the file, by its name: tables, then bundles, each from a new page on. And the file's size.
    The bundles are last, so that the system reads ahead nothing for nothing.
    """
    return _sections(layout, len(encode_header(model, layout, [], 0)))


def _sections(layout: WeightLayout, start: int) -> tuple[dict[str, Piece], int]:
    """As `sections_of`, from byte `start` on."""
    sections = {}
    for name, part in layout.parts().items():
        [table] = part.pieces if name.startswith("table") else [Piece((part.nbytes,), torch.uint8, 0)]
        sections[name] = replace(table, offset=start)
        start += _in_pages(table.nbytes)
    return sections, start


def _in_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def encode_header(model: str, layout: WeightLayout, checksums: Sequence[int], written: int) -> bytes:
    """The file's bytes before its tensors, whole pages, which are as many whatever the last two arguments are.

    `checksums` are of the sections, 32 bits each; `written` is the file's time in seconds. Safetensors allows no gaps
    between tensors: what fills the rest of a tensor's last page is a tensor, `padding.<n>`.
    """
    sections, _ = _sections(layout, 0)
    said = {
        "format": FORMAT,
        "version": VERSION,
        "model": model,
        "layout": json.dumps(asdict(layout), default=str, separators=(",", ":")),
        "checksums": " ".join(f"{checksum:08x}" for checksum in checksums or [0] * len(sections)),
        "written": f"{written:012d}",
    }
    fields: dict[str, Any] = {"__metadata__": said | {"digest": hashlib.sha256(repr(said).encode()).hexdigest()}}
    for number, (name, part) in enumerate(sections.items()):
        stop, end = part.offset + part.nbytes, part.offset + _in_pages(part.nbytes)
        dtype = _DTYPES[dtype_name(part.dtype)]
        fields[name] = {"dtype": dtype, "shape": part.shape, "data_offsets": [part.offset, stop]}
        if stop < end:
            fields[f"padding.{number}"] = {"dtype": "U8", "shape": (end - stop,), "data_offsets": [stop, end]}
    return encode_safetensors(fields, align=PAGE_BYTES)


def _piece(said: Any) -> Piece:
    return Piece(tuple(said["shape"]), getattr(torch, said["dtype"].removeprefix("torch.")), said["offset"])


def read_header(lead: bytes) -> tuple[str, WeightLayout, list[int], int]:
    """The arguments of `encode_header`. `lead` are the file's bytes before its tensors. What has been read is encoded
    again, and must give the very same bytes; else raises `UnusableFile`.
    """
    try:
        said = json.loads(lead[LENGTH_BYTES:])["__metadata__"]
        if said["format"] != FORMAT:
            raise ValueError
        if said["version"] != VERSION:
            raise UnusableFile(f"it is of version {said['version']} of the format, not {VERSION}")
        parts = json.loads(said["layout"])
        bundles = [BundleLayout(tuple(map(_piece, each["pieces"])), each["nbytes"]) for each in parts["bundles"]]
        layout = WeightLayout(bundles, list(map(_piece, parts["tables"])))
        checksums = [int(checksum, 16) for checksum in said["checksums"].split(" ") if checksum]
        read = str(said["model"]), layout, checksums, int(said["written"])
        as_written = encode_header(*read)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError):
        raise UnusableFile("its header is not that of weights of Djinn") from None
    if as_written != lead:
        raise UnusableFile("its header is not as Djinn writes it")
    return read
