"""Which GGUF files are read in place, and where their tensors are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from app.model_store.gguf.index import GgufIndex, GgufTensor

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
    from transformers import PretrainedConfig

Shapes = Mapping[str, tuple[int, ...]]
"""Parameter name to shape, as Transformers has them."""

_MODEL_TYPES = {"llama": {"llama", "mistral"}, "qwen2": {"qwen2"}, "qwen3": {"qwen3"}}
"""By the file's architecture, the model types whose tensors have the same rows there and in Transformers, but for the
rotary pairs of `llama`. GPT-2's are transposed."""


def is_read_in_place(reader: GGUFReader, architecture: str, model_type: str) -> bool:
    """Whether every tensor of the file can be kept as it is."""
    return (
        model_type in _MODEL_TYPES.get(architecture, ())
        and reader.byte_order == "I"
        and all(_is_known(kind) for kind in {tensor.tensor_type for tensor in reader.tensors})
    )


def index_tensors(reader: GGUFReader, source: Path, config: PretrainedConfig, shapes: Shapes) -> GgufIndex:
    """Where the parameters `shapes` of a model of `config` are in the file `source`.

    Raises ValueError if one is missing or has another shape, or if the file has a tensor that no parameter needs.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = str(reader.fields["general.architecture"].contents())
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names: Any = get_tensor_name_map(arch, config.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    sought = {name: names.get_name(name, try_suffixes=(".weight", ".bias")) for name in shapes}
    lacking = sorted(name for name, place in sought.items() if place not in stored)
    if lacking:
        raise ValueError(f"it lacks {', '.join(lacking[:5])}")
    left = sorted(stored.keys() - set(sought.values()))
    if left:
        raise ValueError(f"the model has no use for its tensors {', '.join(left[:5])}")
    heads = _interleaved(config) if architecture == "llama" else {}
    tensors = {name: _entry(stored[place], name, shapes[name], heads) for name, place in sought.items()}
    return GgufIndex(source, source.stat().st_size, tensors)


def _interleaved(config: PretrainedConfig) -> dict[str, int]:
    return {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}


def _entry(tensor: ReaderTensor, name: str, shape: tuple[int, ...], heads: Mapping[str, int]) -> GgufTensor:
    found = tuple(int(length) for length in reversed(tensor.shape))
    if found != shape:
        raise ValueError(f"{name} is {found}, must be {shape}")
    module = name.split(".")[-2]
    offset, nbytes = int(tensor.data_offset), int(tensor.n_bytes)
    return GgufTensor(tensor.tensor_type.name, shape, offset, nbytes, heads.get(module, 0))


def _is_known(kind: GGMLQuantizationType) -> bool:
    """Whether gguf knows the values that tensors of this kind stand for."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
