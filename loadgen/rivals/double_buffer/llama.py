"""A decoder of the Llama family, its weights in bundles: one for each layer, then rows of the output projection."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from loadgen.rivals.double_buffer.layout import Layout

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
PARTS = (
    ("input_layernorm",),
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("post_attention_layernorm",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""The tensors of a layer; those that are multiplied with the same input are one."""


class Feed(Protocol):
    """Where bundles come from, in order and round and round."""

    def use(self, index: int) -> AbstractContextManager[Tensor]:
        """The bytes of bundle `index` on the device, until the block ends."""
        ...


class Checkpoint:
    """Tensors of a Transformers folder, by name, as `dtype` in host memory: copies, so that no file is mapped for
    good. Mapped pages cannot be dropped from the page cache.
    """

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self._files |= dict.fromkeys(file.offset_keys(), path)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as file:
            found: Tensor = file.get_tensor(name)
        return found.to(self._dtype, copy=True)

    @property
    def names(self) -> set[str]:
        """Of all tensors."""
        return set(self._files)


class Llama:
    """The model but for where its bundles are. Embedding rows are looked up in host memory; the last norm stays on the
    device.

    Raises ValueError if the folder has tensors that a Llama lacks, such as biases.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        self._weights = Checkpoint(folder, dtype)
        self._dtype, self._device = dtype, device
        self.num_layers: int = self._config.num_hidden_layers
        self._check_names()
        self._heads: int = self._config.num_attention_heads
        self._kv_heads: int = self._config.num_key_value_heads
        self._size: int = getattr(self._config, "head_dim", None) or self._config.hidden_size // self._heads
        self._embedding = self._weights[EMBEDDING]
        self._norm = self._weights[NORM].to(device)
        self._rotary = LlamaRotaryEmbedding(self._config).to(device)
        layer = Layout([tuple(tensor.shape) for tensor in self._layer_tensors(0)], dtype)
        self.layouts = [layer] * self.num_layers + self._head_layouts(layer.nbytes)

    def bundles(self) -> Iterator[Tensor]:
        """The bytes of every bundle, in order."""
        for layer in range(self.num_layers):
            yield self.layouts[layer].pack(self._layer_tensors(layer))
        head = self._weights[HEAD if HEAD in self._weights.names else EMBEDDING]
        first = 0
        for layout in self.layouts[self.num_layers :]:
            (rows,) = layout.views(torch.empty(layout.nbytes, dtype=torch.uint8))
            yield layout.pack([head[first : first + len(rows)]])
            first += len(rows)

    def new_kv(self, batch: int, tokens: int) -> Tensor:
        """Room for keys and values, `[layers, 2, batch, kv_heads, tokens, size]`."""
        shape = (self.num_layers, 2, batch, self._kv_heads, tokens, self._size)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def step(self, ids: Tensor, first: int, kv: Tensor, feed: Feed) -> Tensor:
        """Take `ids` `[batch, tokens]`, which begin at position `first`, through the model.

        Returns the likeliest next id of each row, `[batch, 1]`. A pass over several tokens begins at position 0.
        """
        hidden = F.embedding(ids.cpu(), self._embedding).to(self._device)
        positions = torch.arange(first, first + ids.shape[1], device=self._device)[None]
        rotation = self._rotary(hidden, positions)
        for layer in range(self.num_layers):
            with feed.use(layer) as memory:
                hidden = self._layer(hidden, self.layouts[layer].views(memory), kv[layer], first, rotation)
        hidden = self._normed(hidden[:, -1:], self._norm)
        scores = []
        for index in range(self.num_layers, len(self.layouts)):
            with feed.use(index) as memory:
                (rows,) = self.layouts[index].views(memory)
                scores.append(F.linear(hidden, rows))
        return torch.cat(scores, -1).argmax(-1)

    def _layer(
        self, hidden: Tensor, weights: list[Tensor], kv: Tensor, first: int, rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        norm, qkv, out, mlp_norm, gate_up, down = weights
        batch, tokens, _ = hidden.shape
        last = first + tokens
        heads = F.linear(self._normed(hidden, norm), qkv).view(batch, tokens, -1, self._size).transpose(1, 2)
        queries, keys, values = heads.split((self._heads, self._kv_heads, self._kv_heads), dim=1)
        kv[0, :, :, first:last] = _rotated(keys, *rotation)
        kv[1, :, :, first:last] = values
        mixed = F.scaled_dot_product_attention(
            _rotated(queries, *rotation), kv[0, :, :, :last], kv[1, :, :, :last], is_causal=tokens > 1, enable_gqa=True
        )
        hidden = hidden + F.linear(mixed.transpose(1, 2).reshape(batch, tokens, -1), out)
        gate, up = F.linear(self._normed(hidden, mlp_norm), gate_up).chunk(2, -1)
        return hidden + F.linear(F.silu(gate) * up, down)

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self._config.rms_norm_eps)

    def _layer_tensors(self, layer: int) -> list[Tensor]:
        return [torch.cat([self._weights[_name(layer, part)] for part in parts]) for parts in PARTS]

    def _head_layouts(self, most_bytes: int) -> list[Layout]:
        """The output projection in runs of rows that are about as large as a layer."""
        rows, width = self._embedding.shape
        most = max(1, most_bytes // (width * self._dtype.itemsize))
        return [Layout([(min(most, rows - first), width)], self._dtype) for first in range(0, rows, most)]

    def _check_names(self) -> None:
        known = {EMBEDDING, NORM, HEAD}
        known |= {_name(layer, part) for layer in range(self.num_layers) for parts in PARTS for part in parts}
        if others := self._weights.names - known:
            raise ValueError(f"not a plain Llama: {len(others)} tensors are unknown, such as {min(others)}")


def _name(layer: int, part: str) -> str:
    return f"model.layers.{layer}.{part}.weight"


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021) in halves, as Llama's checkpoints have it."""
    low, high = heads.chunk(2, -1)
    return heads * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None]
