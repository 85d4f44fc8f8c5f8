"""The header of a file of bundles: whose weights it holds, where each lies, their checksums. Nothing here does I/O.

A reader builds the header that it wants, puts the file's checksums in, and wants the very same bytes: there is no
second way to write a file that is accepted.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from app.gpu.device.dtypes import dtype_name
from app.gpu.state.kv_header import LENGTH_BYTES, SAFETENSORS_DTYPES, encode_safetensors
from app.gpu.weights.layout import BundleLayout, Piece

FORMAT = "djinn-weights"
VERSION = "2"

PAGE_BYTES = 4096
"""Bytes. Every bundle and table begins on a page of the file."""

_TABLE_DTYPES = {**SAFETENSORS_DTYPES, "uint8": ("U8", 1)}


class BundleFileUnusable(Exception):
    """The file is not the one that is wanted; the text is a sentence that says why."""


@dataclass(frozen=True, slots=True)
class BundleContents:
    """What a file holds. Two files with the same contents differ in nothing: a fingerprint stands for the weights."""

    fingerprint: str
    dtype: torch.dtype
    layouts: Sequence[BundleLayout]
    tables: Sequence[Piece]


@dataclass(frozen=True, slots=True)
class Section:
    """One tensor of the file: `nbytes` bytes, `offset` bytes from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """Where the next section may begin."""
        return self.offset + -(-self.nbytes // PAGE_BYTES) * PAGE_BYTES


def sections_of(contents: BundleContents) -> list[Section]:
    """Tables, then bundles in the order of their use, each from a new page on: the system reads on behind the last
    bundle, where nothing is now that would have to be read for nobody.
    """
    count = len(contents.layouts) + len(contents.tables)
    return _place(contents, len(encode_header(contents, [0] * count)))


def file_bytes(contents: BundleContents) -> int:
    """Size of the file."""
    sections = sections_of(contents)
    return sections[-1].end if sections else len(encode_header(contents, []))


def encode_header(contents: BundleContents, checksums: Sequence[int]) -> bytes:
    """The file's bytes before its tensors, whole pages.

    Safetensors allows no gaps between tensors: what fills the rest of a tensor's last page is a tensor, `padding.<n>`.
    `checksums` are of the sections, 32 bits each; the header is as long whatever they are.
    """
    fields: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": contents.fingerprint,
            "dtype": dtype_name(contents.dtype),
            "layouts": _describe(contents.layouts),
            "checksums": " ".join(f"{checksum:08x}" for checksum in checksums),
        }
    }
    for number, section in enumerate(_place(contents, 0)):
        stop = section.offset + section.nbytes
        fields[section.name] = _field(section.dtype, section.shape, section.offset, stop)
        if stop < section.end:
            fields[f"padding.{number}"] = _field("U8", (section.end - stop,), stop, section.end)
    return encode_safetensors(fields, align=PAGE_BYTES)


def match_header(lead: bytes, contents: BundleContents) -> list[int]:
    """The checksums of the sections. `lead` are the file's bytes before its tensors.

    Raises `BundleFileUnusable` with the reason unless the file has, or says that it has, the `contents`.
    """
    try:
        metadata = json.loads(lead[LENGTH_BYTES:])["__metadata__"]
        if metadata["format"] != FORMAT:
            raise ValueError
        found = {name: str(metadata[name]) for name in ("version", "fingerprint", "dtype", "layouts")}
        checksums = [int(checksum, 16) for checksum in metadata["checksums"].split(" ") if checksum]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise BundleFileUnusable("its header is not that of weights of Djinn") from None
    if found["version"] != VERSION:
        raise BundleFileUnusable(f"it is of version {found['version']} of the format, not {VERSION}")
    if found["fingerprint"] != contents.fingerprint:
        raise BundleFileUnusable(f"it is of the model {found['fingerprint']!r}, not {contents.fingerprint!r}")
    if found["dtype"] != dtype_name(contents.dtype):
        raise BundleFileUnusable(f"its weights are {found['dtype']}, not {dtype_name(contents.dtype)}")
    if found["layouts"] != _describe(contents.layouts):
        raise BundleFileUnusable("its bundles are laid out in another way")
    if encode_header(contents, checksums) != lead:
        raise BundleFileUnusable("its header is not as Djinn writes it")
    return checksums


def _place(contents: BundleContents, start: int) -> list[Section]:
    """The sections, one after the other, from `start` on."""
    sections: list[Section] = []
    for index, table in enumerate(contents.tables):
        dtype, _ = _TABLE_DTYPES[dtype_name(table.dtype)]
        sections.append(Section(f"table.{index}", dtype, table.shape, start, table.nbytes))
        start = sections[-1].end
    for index, layout in enumerate(contents.layouts):
        sections.append(Section(f"bundle.{index}", "U8", (layout.nbytes,), start, layout.nbytes))
        start = sections[-1].end
    return sections


def _field(dtype: str, shape: tuple[int, ...], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def _describe(layouts: Sequence[BundleLayout]) -> str:
    """Each bundle's bytes, and the shape, dtype and place of each of its tensors."""
    return json.dumps(
        [
            [layout.nbytes, [[piece.shape, dtype_name(piece.dtype), piece.offset] for piece in layout.pieces]]
            for layout in layouts
        ],
        separators=(",", ":"),
    )
