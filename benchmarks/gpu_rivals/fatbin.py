"""Kernels of one GPU architecture: a library has those of eight, and packs to a third without the others.

The CUDA driver reads the headers in a library's `.nv_fatbin` section and loads the entry that fits the device best. So
a device of that architecture needs no other entry. The layout of the headers is that of
`fatbinary_section.h` in the CUDA toolkit and of github.com/n-eiling/cuda-fatbin-decompression.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

_HEAD = 0xBA55ED50, 1, 16
"""Magic number, version, bytes of this header."""
_MAGIC = struct.pack("<IHH", *_HEAD)
_FATBIN = struct.Struct("<IHHQ")
"""Those, and the bytes of all entries."""
_ENTRY = struct.Struct("<HHIQIIHHI")
"""Kind, version, bytes of this header, bytes of the payload, two sizes, two of the version, architecture."""
_PTX, _MACHINE_CODE = 1, 2


class Entry(NamedTuple):
    """Code of one kind for `architecture`, such as 90; its header and payload are `library[start:end]`."""

    kind: int
    architecture: int
    start: int
    end: int


def keep_architecture(library: bytes, architecture: int) -> bytearray:
    """The library with zeros in place of the code that a device of `architecture` does not load. Of each file's kernels
    it keeps the machine code of the nearest lower architecture of the same generation, or else PTX of lower ones.
    """
    kept = bytearray(library)
    for at, entries in _fatbins(library):
        fitting = [
            each.architecture
            for each in entries
            if each.kind == _MACHINE_CODE
            and each.architecture <= architecture
            and each.architecture // 10 == architecture // 10
        ]
        loaded = b"".join(
            library[start:end]
            for kind, built_for, start, end in entries
            if (kind == _MACHINE_CODE and built_for == max(fitting) if fitting else built_for <= architecture)
            and kind == (_MACHINE_CODE if fitting else _PTX)
        )
        kept[at : entries[-1].end] = _FATBIN.pack(*_HEAD, len(loaded)) + loaded.ljust(
            entries[-1].end - at - _FATBIN.size, b"\0"
        )
    return kept


def _fatbins(library: bytes) -> Iterator[tuple[int, list[Entry]]]:
    """Where each fat binary is, and its entries."""
    at = library.find(_MAGIC)
    while at >= 0:
        *_, size = _FATBIN.unpack_from(library, at)
        begin, end = at + _FATBIN.size, at + _FATBIN.size + size
        entries = []
        while begin < end:
            kind, _, header, payload, _, _, _, _, built_for = _ENTRY.unpack_from(library, begin)
            entries.append(Entry(kind, built_for, begin, begin + header + payload))
            begin += header + payload
        yield at, entries
        at = library.find(_MAGIC, end)
