"""What KV is made of, as the running server and a session that it exported tell it."""

from dataclasses import dataclass

from client import MemoryMap
from client.models import Model
from loadgen.experiments.kv.session_file import SessionFile

GROWTH_TOKENS = tuple(128 << power for power in range(11))
"""128 to 131,072."""


@dataclass(frozen=True, slots=True)
class Structure:
    """Layers as `/v1/models` has them, blocks as `/v1/memory` has them, the rest read from the exported file."""

    model: str
    max_model_len: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    element_bytes: int
    block_tokens: int
    block_bytes: int
    file_shape: tuple[int, ...]
    computed_tokens: int
    file_bytes: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of every layer and head: the textbook's formula, with the file's figures."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.element_bytes

    @property
    def agrees(self) -> bool:
        """Whether the formula leads to the block that the server accounts for, and the file has those blocks."""
        blocks = -(-self.computed_tokens // self.block_tokens)
        shape = (blocks, self.layers, 2, self.kv_heads, self.block_tokens, self.head_dim)
        return self.bytes_per_token * self.block_tokens == self.block_bytes and self.file_shape == shape

    def session_bytes(self, tokens: int) -> int:
        """KV of a session: whole blocks."""
        return -(-tokens // self.block_tokens) * self.block_bytes


@dataclass(frozen=True, slots=True)
class Growth:
    """A session of `tokens` tokens: its KV, and how many such sessions fit in a tier at once."""

    tokens: int
    bytes: int
    on_device: int
    on_host: int


def read_structure(model: Model, memory: MemoryMap, file: SessionFile) -> Structure:
    """Put together what was found in three places."""
    _, _, _, kv_heads, _, head_dim = file.kv.shape
    return Structure(
        model=model.id,
        max_model_len=model.max_model_len,
        layers=model.layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=file.dtype,
        element_bytes=file.kv.itemsize,
        block_tokens=memory.data.block_tokens,
        block_bytes=memory.data.block_bytes,
        file_shape=file.kv.shape,
        computed_tokens=file.computed_tokens,
        file_bytes=len(file.content),
        device_bytes=memory.data.device.total_bytes,
        host_bytes=memory.data.host.total_bytes,
        disk_bytes=memory.data.disk.total_bytes,
    )


def grow(structure: Structure) -> tuple[Growth, ...]:
    """How a session grows, whatever the model's context: what a longer one would need is part of the question."""
    return tuple(
        Growth(tokens, size, structure.device_bytes // size, structure.host_bytes // size)
        for tokens in GROWTH_TOKENS
        for size in (structure.session_bytes(tokens),)
    )
