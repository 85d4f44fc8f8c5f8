"""The header of a KV file: whose KV it is, and what must agree before it can be used. Nothing here does I/O.

A reader rebuilds the header from the few values in it and wants the very same bytes, so there is no second way to write
a file that is accepted.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import Any

from app.domain.values import MAX_LABEL_BYTES
from app.gpu.state.layer_state import ONE_GROUP, Groups

FORMAT = "djinn-kv"
SHOWN = 12
"""Digits of a fingerprint in an error: enough to tell two models apart."""

SAFETENSORS_DTYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2), "float8": ("F8_E4M3", 1)}
"""Name and bytes of an element, by PyTorch's name of the dtype."""

SCALE_BYTES = 4
"""Of a row of float8; see `attention.base`."""
LENGTH_BYTES = 8
TOKEN_BYTES = 4
ADAPTER_BYTES = 32
"""Of an adapter's digest."""
MAX_TOKENS = 1 << 24
"""Of a file of the server's own, whatever its sessions may have by now."""


class Checksum(StrEnum):
    """How the last tensor of a file, which has this name, guards all bytes before it."""

    SHA256 = "sha256"
    """In files that go out and come in, and in all of older servers."""
    CRC32 = "crc32"
    """In files that a server writes for itself: it takes less than half of the time when one is read."""

    @property
    def bytes(self) -> int:
        """Its length."""
        return 32 if self is Checksum.SHA256 else 4

    @property
    def version(self) -> str:
        """The version of the format that files with it are of."""
        return "2" if self is Checksum.SHA256 else "3"


class KVFileError(Exception):
    """The file cannot be used; the text is a sentence that says why."""


class KVFileDamaged(KVFileError):
    """The file is not whole, or nothing that Djinn wrote."""


class KVFileMismatch(KVFileError):
    """The file is of another version, of another model, or its KV is laid out differently."""


def row_columns(head_dim: int, dtype: str) -> int:
    """Elements of `dtype` that the keys, or the values, of one head of one token take."""
    return head_dim + (SCALE_BYTES if dtype == "float8" else 0)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one block is: `[layers, 2, kv_heads, block_size, columns]` elements of `dtype`, such as `float32`.

    `columns` is `head_dim`, and in float8 four more: the bytes of the row's scale, a float32.
    """

    layers: int
    kv_heads: int
    block_size: int
    head_dim: int
    dtype: str
    state_bytes: int = 0
    """Of what a sequence's folding layers remember, in the last of its blocks."""
    state_dtype: str = ""
    """As the stack computes."""
    keeps_tokens: bool = True
    """Whether anything is kept for each token. If not, blocks have states only."""
    groups: Groups = ONE_GROUP
    """Those that the model's layers are divided into. A block has at most `layers` of one."""

    @property
    def state_blocks(self) -> int:
        """Blocks that have the state of a sequence."""
        return -(-self.state_bytes // self.block_bytes)

    def token_blocks(self, tokens: int, behind: int) -> int:
        """Blocks before those, of a sequence of so many tokens with so many blocks `behind` its window."""
        blocks = -(-tokens // self.block_size) * self.groups.size if self.keeps_tokens else 0
        return self.groups.count_held(blocks, behind)

    @property
    def block_shape(self) -> list[int]:
        """Elements of one block along each axis."""
        return [self.layers, 2, self.kv_heads, self.block_size, row_columns(self.head_dim, self.dtype)]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        _, element_bytes = SAFETENSORS_DTYPES[self.dtype]
        return prod(self.block_shape) * element_bytes


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """What KV must have in common to be interchangeable: the model's weights, and how the blocks are laid out."""

    fingerprint: str
    vocab_size: int
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class KVFileHeader:
    """What a file holds: a history, and blocks with the KV of its first `computed_tokens` tokens. So many of these lie
    `behind` the window.

    `namespace` is the one that the session shares prefixes in, `adapter` the digest of the LoRA adapter that its KV is
    computed with. `about_bytes` are the length of an export's label.
    """

    identity: KVIdentity
    token_ids: Sequence[int]
    computed_tokens: int
    namespace: bytes = b""
    about_bytes: int = 0
    checksum: Checksum = Checksum.SHA256
    behind: int = 0
    adapter: str = ""

    @property
    def blocks(self) -> int:
        """Blocks in the file: of tokens, the last one maybe partly filled, and of the state."""
        return self.token_blocks + self.identity.layout.state_blocks * bool(self.computed_tokens)

    @property
    def token_blocks(self) -> int:
        """Those of tokens."""
        return self.identity.layout.token_blocks(self.computed_tokens, self.behind)

    @property
    def partial(self) -> range:
        """Which of these are filled in part: those of the last tokens, if they do not fill them."""
        end, layout = self.token_blocks, self.identity.layout
        is_partial = end and self.computed_tokens % layout.block_size
        return range(end - layout.groups.size if is_partial else end, end)

    @property
    def about_at(self) -> int:
        """Where in the file `about` begins, in bytes."""
        return len(encode_header(self)) + len(self.token_ids) * TOKEN_BYTES


def file_bytes(header: KVFileHeader) -> int:
    """Size of the file that `header` leads to."""
    return len(encode_header(header)) + sum(_tensor_bytes(header))


def encode_header(header: KVFileHeader) -> bytes:
    """The file's bytes before its tensors, a multiple of 8."""
    layout = header.identity.layout
    dtype, _ = SAFETENSORS_DTYPES[layout.dtype]
    fields: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "version": header.checksum.version,
            "fingerprint": header.identity.fingerprint,
            "computed_tokens": str(header.computed_tokens),
            "namespace": header.namespace.hex(),
            **({"adapter": header.adapter} if header.adapter else {}),
            **({"groups": "{}+{}".format(*layout.groups)} if layout.groups.size > 1 else {}),
            **({"first_block": str(header.behind)} if header.behind else {}),
            **({"state": _state_of(layout)} if layout.state_bytes else {}),
        },
        "token_ids": {"dtype": "I32", "shape": [len(header.token_ids)]},
        "about": {"dtype": "U8", "shape": [header.about_bytes]},
        "kv": {"dtype": dtype, "shape": [header.blocks, *layout.block_shape]},
        header.checksum: {"dtype": "U8", "shape": [header.checksum.bytes]},
    }
    offset = 0
    for name, length in zip(("token_ids", "about", "kv", header.checksum), _tensor_bytes(header), strict=True):
        fields[name]["data_offsets"] = [offset, offset + length]
        offset += length
    return encode_safetensors(fields, align=8)


def encode_safetensors(fields: Mapping[str, Any], *, align: int) -> bytes:
    """A safetensors file's bytes before its tensors: a length, then `fields` as JSON, padded with spaces.

    The bytes returned are a multiple of `align`. The library writes headers only together with all tensors.
    """
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % align)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _state_of(layout: KVLayout) -> str:
    return f"{layout.state_bytes} bytes {layout.state_dtype}"


def _tensor_bytes(header: KVFileHeader) -> tuple[int, int, int, int]:
    kv = header.blocks * header.identity.layout.block_bytes
    return len(header.token_ids) * TOKEN_BYTES, header.about_bytes, kv, header.checksum.bytes


def read_header(lead: bytes, expected: KVIdentity, max_tokens: int) -> KVFileHeader:
    """The header that these first bytes of a file are, with as many tokens as they claim, but not which.

    Raises `KVFileDamaged`, `KVFileMismatch` unless the `expected` model and layout can use the file, and `KVFileError`
    if it claims more than `max_tokens` or `MAX_LABEL_BYTES`.
    """
    try:
        fields = json.loads(lead[LENGTH_BYTES:])
        metadata = fields["__metadata__"]
        if metadata["format"] != FORMAT:
            raise ValueError
        checksums = {checksum.version: checksum for checksum in Checksum}
        if metadata["version"] not in checksums:
            known = " or ".join(checksums)
            raise KVFileMismatch(f"it is of version {metadata['version']} of the format, not {known}")
        [tokens], computed_tokens = fields["token_ids"]["shape"], int(metadata["computed_tokens"])
        [about_bytes] = fields["about"]["shape"]
        _check_count("token_ids", tokens, max_tokens)
        _check_count("about", about_bytes, MAX_LABEL_BYTES)
        behind, stripe = int(metadata.get("first_block", 0)), expected.layout.groups.size
        if behind % stripe or not 0 <= behind // stripe * expected.layout.block_size <= computed_tokens <= tokens:
            raise ValueError
        adapter = str(metadata.get("adapter", ""))
        if len(bytes.fromhex(adapter)) not in (0, ADAPTER_BYTES):
            raise ValueError
        namespace, checksum = bytes.fromhex(metadata["namespace"]), checksums[metadata["version"]]
        _match(str(metadata["fingerprint"]), str(fields["kv"]["dtype"]), list(fields["kv"]["shape"][1:]), expected)
        if str(metadata.get("state", "")) not in ("", _state_of(expected.layout)):
            raise KVFileMismatch(
                f"its state is of {metadata['state']}, this server's are of {_state_of(expected.layout)}: see --dtype"
            )
    except (ValueError, TypeError, LookupError, RecursionError):
        raise KVFileDamaged("its header is not that of a session of Djinn") from None
    header = KVFileHeader(expected, range(tokens), computed_tokens, namespace, about_bytes, checksum, behind, adapter)
    if encode_header(header) != lead:
        raise KVFileDamaged("its header is not as Djinn writes it")
    return header


def _check_count(name: str, count: object, most: int) -> None:
    if type(count) is not int or count < 0:
        raise ValueError
    if count > most:
        raise KVFileError(f"its {name} has too many elements: there may be from 0 to {most}")


def _match(fingerprint: str, dtype: str, block_shape: list[object], expected: KVIdentity) -> None:
    """Raise `KVFileMismatch` if the KV is of another model, or laid out differently."""
    if fingerprint != expected.fingerprint:
        theirs, ours = fingerprint[:SHOWN], expected.fingerprint[:SHOWN]
        raise KVFileMismatch(f"it is of another model or other weights: its sum begins with {theirs}, ours with {ours}")
    found = dtype, block_shape
    layouts = {name: replace(expected.layout, dtype=name) for name in SAFETENSORS_DTYPES}
    shapes = {name: (SAFETENSORS_DTYPES[name][0], layout.block_shape) for name, layout in layouts.items()}
    wanted = shapes.pop(expected.layout.dtype)
    for name, shape in shapes.items():
        if found == shape:
            raise KVFileMismatch(
                f"its KV is {name}, and this server keeps KV as {expected.layout.dtype}: see --kv-dtype"
            )
    if found != wanted:
        raise KVFileMismatch(
            f"its KV blocks are {dtype} {block_shape}, this server's are {wanted[0]} {wanted[1]} (layers, keys and "
            "values, heads, tokens, elements)"
        )


def check_tokens(token_ids: Sequence[int], expected: KVIdentity) -> None:
    """Raise `KVFileDamaged` unless all of them are in the vocabulary."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < expected.vocab_size:
        raise KVFileDamaged(f"it has token ids outside the vocabulary, 0 to {expected.vocab_size - 1}")
