"""From what a GGUF file says to a Transformers config, and from its tensors to Transformers' parameters.

llama.cpp's converter renames tensors, stores some in another order or with 1 added, and writes a config as fields of
its own. Each family here says how that is undone. The names are those of gguf's own tables; how tensors are changed is
in llama.cpp, `convert_hf_to_gguf.py`. What is missed would be another model, so whatever is not known is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from app.model_store.saved import Config
from app.model_store.tensors import GgufIndex, GgufTensor

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, ReaderField, ReaderTensor

Shapes = Mapping[str, tuple[int, ...]]
"""Parameter name to shape, as Transformers has them."""
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})")
_COMMON = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
"""Fields of every decoder's config, and where the file has them behind the architecture's name."""
_FLAT_ROPE = {"default", "linear", "yarn"}
_FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias)?$")
_LLAMA3_LENGTHS = [8192, *(1 << power for power in range(4, 21))]
"""Tokens for which a model was made before its frequencies were scaled in Llama 3's way: the published number first."""


@dataclass(frozen=True, slots=True)
class Family:
    """What differs between architectures: `fields` of the config, and `constants` that the architecture implies."""

    model_types: tuple[str, ...]
    """The first is that of a config that Transformers does not read from such a file; see `reads`."""
    fields: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    reads: bool = True
    """Whether Transformers reads config and tokenizer from the file."""
    interleaved: bool = False
    """Whether the rows of queries and keys are interleaved for rotary pairs."""
    norms: float = 0.0
    """What is added to the weights of norms."""


_GEMMA = {"head_dim": "attention.key_length", "sliding_window": "attention.sliding_window"}
FAMILIES = {
    "llama": Family(("llama", "mistral"), interleaved=True),
    "qwen2": Family(("qwen2",)),
    "qwen3": Family(("qwen3",)),
    "qwen3moe": Family(
        ("qwen3_moe",),
        {"moe_intermediate_size": "expert_feed_forward_length"},
        {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
    "phi3": Family(("phi3",), {"sliding_window": "attention.sliding_window"}),
    "gemma2": Family(
        ("gemma2",),
        {
            **_GEMMA,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        norms=1.0,
    ),
    "gemma3": Family(("gemma3_text",), _GEMMA, norms=1.0),
    "granite": Family(
        ("granite",),
        {
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        reads=False,
        interleaved=True,
    ),
    "glm4": Family(("glm4",), {"head_dim": "attention.key_length"}, reads=False),
    "lfm2": Family(("lfm2",)),
    "gpt-oss": Family(
        ("gpt_oss",),
        {
            "head_dim": "attention.key_length",
            "sliding_window": "attention.sliding_window",
            "intermediate_size": "expert_feed_forward_length",
            "num_local_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
        },
        reads=False,
    ),
}
"""By architecture. Those of other files are converted, see `gguf`."""


def shards_of(source: Path) -> list[Path]:
    """All files of the model of which `source` is one, in order. Raises ValueError if one is missing."""
    found = _SHARD.fullmatch(source.stem)
    if found is None:
        return [source]
    count = int(found[3])
    paths = [source.with_name(f"{found[1]}-{index:05}-of-{found[3]}.gguf") for index in range(1, count + 1)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ValueError(f"it is one of {count} files, and {missing[0]} is not there")
    return paths


class GgufModel:
    """The files of a model as one: metadata of the first, tensors of all."""

    def __init__(self, source: Path) -> None:
        """Raises ValueError if a file is missing, and whatever gguf raises for a broken one."""
        from gguf import GGUFReader

        self.files = shards_of(source)
        readers = [GGUFReader(path) for path in self.files]
        self.is_little_endian = all(reader.byte_order == "I" for reader in readers)
        self._fields: Mapping[str, ReaderField] = readers[0].fields
        self.tensors: dict[str, tuple[int, ReaderTensor]] = {
            tensor.name: (index, tensor) for index, reader in enumerate(readers) for tensor in reader.tensors
        }
        """By name: the number of the file, and the tensor."""
        self.architecture = self.text("general.architecture")

    def get(self, name: str, absent: Any = None) -> Any:
        """A field of the metadata; one that begins with a dot is the architecture's."""
        found: Any = self._fields.get(f"{self.architecture}{name}" if name.startswith(".") else name)
        return absent if found is None else found.contents()

    def number(self, name: str) -> float:
        """A number of the metadata, or 0 if it is not there. Raises ValueError for anything else."""
        found = self.get(name, 0)
        if not isinstance(found, int | float):
            raise ValueError(f"{name} is no number")
        return found

    def text(self, name: str) -> str:
        """A string of the metadata, or "" if it is not there. Raises ValueError for anything else."""
        found = self.get(name, "")
        if not isinstance(found, str):
            raise ValueError(f"{name} is no string")
        return found


def config_of(model: GgufModel) -> Any:
    """The config that the file's model has in Transformers. Raises ValueError for what is not known here."""
    from transformers import AutoConfig

    family = FAMILIES.get(model.architecture)
    if family is None or family.reads:
        config: Any = AutoConfig.from_pretrained(model.files[0].parent, gguf_file=model.files[0].name)
    else:
        tokens = model.get("tokenizer.ggml.tokens", [])
        known = {name: model.get(f".{place}") for name, place in _COMMON.items()}
        known |= {"rope_theta": model.get(".rope.freq_base"), "vocab_size": len(tokens)}
        known |= {f"{kind}_token_id": model.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos")}
        stated = {name: value for name, value in known.items() if value is not None}
        config = AutoConfig.for_model(family.model_types[0], **stated, pad_token_id=None)
    if family is None or config.model_type not in family.model_types:
        return config
    config.tie_word_embeddings = "output.weight" not in model.tensors
    if (config.pad_token_id or 0) >= config.vocab_size:  # a default, of another vocabulary
        config.pad_token_id = None
    for name, place in family.fields.items():
        found = model.get(f".{place}")
        if found is not None:
            setattr(config, name, found)
    for name, value in family.constants.items():
        setattr(config, name, value)
    if model.architecture == "glm4":
        config.attention_bias = "blk.0.attn_q.bias" in model.tensors
    if model.architecture.startswith("gemma"):  # as llama.cpp scales its queries
        largest = config.num_hidden_layers == {"gemma2": 46, "gemma3": 62}[model.architecture]
        heads = config.num_attention_heads
        config.query_pre_attn_scalar = config.hidden_size // heads if largest else config.head_dim
    _read_rope(config, model)
    return config


def _read_rope(config: Any, model: GgufModel) -> None:
    """How rotary embeddings are scaled. Raises ValueError for a way that is not known, or lost."""
    if any(name.startswith("rope_factors") for name in model.tensors):
        raise ValueError("its rotary embedding is scaled by lists of factors, which Djinn does not have")
    kind, layers = model.text(".rope.scaling.type") or "default", getattr(config, "rope_parameters", None) or {}
    kind = "default" if kind == "none" else kind
    of_layers = [each for each in layers.values() if isinstance(each, dict)]
    rope = layers.get("full_attention", layers) if of_layers else layers
    if kind not in _FLAT_ROPE:
        raise ValueError(f"its rotary embedding is scaled as {kind!r}, which Djinn does not read")
    rope["rope_theta"] = float(model.get(".rope.freq_base", rope.get("rope_theta", 10_000.0)))
    rope["rope_type"] = kind
    if kind != "default":
        rope["factor"] = float(model.number(".rope.scaling.factor"))
        if rope["factor"] <= 1:
            raise ValueError(f"its rotary embedding is scaled by {rope['factor']:g}, which is not more than 1")
    if kind == "yarn":
        rope["original_max_position_embeddings"] = int(model.number(".rope.scaling.original_context_length"))
        for name in ("beta_fast", "beta_slow"):
            rope[name] = float(model.get(f".rope.scaling.yarn_{name}", {"beta_fast": 32.0, "beta_slow": 1.0}[name]))
        rope["truncate"] = model.architecture != "gpt-oss"
    width, rotated = getattr(config, "head_dim", None), model.number(".rope.dimension_count")
    width = width or config.hidden_size // config.num_attention_heads
    if rotated and rotated != width:
        if model.architecture != "glm4":
            raise ValueError("its heads are rotated in part, which is lost in conversion; use its Transformers folder")
        rope["partial_rotary_factor"] = rotated / width
    if "rope_freqs.weight" in model.tensors:
        rope |= _llama3_rope(config, model)
    config.rope_parameters = layers


def _llama3_rope(config: Any, model: GgufModel) -> dict[str, Any]:
    """What Llama 3.1 and later are scaled by: the file has what each frequency is divided by instead."""
    from copy import deepcopy

    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stored = torch.from_numpy(model.tensors["rope_freqs.weight"][1].data.copy()).float()
    trial = deepcopy(config)
    rope = trial.rope_parameters
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2).float() / width)
    low_high = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    factor = round(float(stored.max()), 3)
    for tokens in _LLAMA3_LENGTHS if factor > 1 else ():
        found = low_high | {"factor": factor, "original_max_position_embeddings": tokens}
        rope |= found
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](trial)
        if stored.shape == frequencies.shape and torch.allclose(plain / stored, frequencies, rtol=1e-5):
            return found
    raise ValueError("its rotary embedding is scaled by factors that are not those of Llama 3; use its folder")


def is_read_in_place(model: GgufModel, model_type: str) -> bool:
    """Whether every tensor of the file can be kept as it is."""
    family = FAMILIES.get(model.architecture)
    return (
        family is not None
        and model_type in family.model_types
        and model.is_little_endian
        and all(_is_known(kind) for kind in {tensor.tensor_type for _, tensor in model.tensors.values()})
    )


def index_tensors(model: GgufModel, config: Config, shapes: Shapes) -> GgufIndex:
    """Where the parameters `shapes` of a model of `config` are in the files. Of experts that Transformers keeps in one
    parameter each has its own, as in a checkpoint; those of gpt-oss have gates and others apart.

    Raises ValueError if one is missing or has another shape, or if there is a tensor that no parameter needs.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == model.architecture)
    names: Any = get_tensor_name_map(arch, config.num_hidden_layers)
    family, tensors, used = FAMILIES[model.architecture], dict[str, GgufTensor](), set[str]()
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if family.interleaved else {}
    lacking, apart = list[str](), config.model_type != "gpt_oss"
    for name, shape in shapes.items():
        for part, of_part in _stored_parts(name, shape, apart=apart):
            base = part.removesuffix("_bias")
            place = names.get_name(base, try_suffixes=(".weight", ".bias")) or name
            if place not in model.tensors:
                place += ".weight" if base == part else ".bias"
            if place not in model.tensors:
                lacking.append(name)
                continue
            used.add(place)
            file, tensor = model.tensors[place]
            added = family.norms if "norm" in name and name.endswith(".weight") else 0.0
            found = _entry(tensor, file, part, of_part, heads.get(name.split(".")[-2], 0), added)
            tensors |= _of_each(part, found) if apart and _FUSED.fullmatch(name) else {part: found}
    if lacking:
        raise ValueError(f"it lacks {', '.join(sorted(lacking)[:5])}")
    left = sorted(model.tensors.keys() - used - {"rope_freqs.weight"})
    if left:
        raise ValueError(f"the model has no use for its tensors {', '.join(left[:5])}")
    return GgufIndex(tuple(model.files), tuple(path.stat().st_size for path in model.files), tensors)


def _stored_parts(name: str, shape: tuple[int, ...], *, apart: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """What a file has of a parameter, with its shapes there: of experts, gates `[experts, out, in]` and others beside
    them. Transformers has `[experts, out, in]` too, unless they are not `apart`: `[experts, in, out]`.
    """
    found = _FUSED.fullmatch(name)
    if found is None:
        yield name, shape
        return
    base, kind, bias = found[1], found[2], found[3] or ""
    experts, *matrix = shape
    outputs, inputs = (*matrix, 0) if bias else matrix if apart else matrix[::-1]
    kinds, outputs = (("gate_proj", "up_proj"), outputs // 2) if kind == "gate_up_proj" else (("down_proj",), outputs)
    for each in kinds:
        yield f"{base}.{each}{bias}", (experts, outputs) if bias else (experts, outputs, inputs)


def _of_each(name: str, whole: GgufTensor) -> dict[str, GgufTensor]:
    """The matrices of single experts, by the names of a checkpoint that keeps them apart."""
    (base, kind), experts = name.rsplit(".", 1), whole.shape[0]
    nbytes = whole.nbytes // experts
    return {
        f"{base}.{index}.{kind}.weight": replace(
            whole, shape=whole.shape[1:], offset=whole.offset + index * nbytes, nbytes=nbytes
        )
        for index in range(experts)
    }


def _entry(tensor: ReaderTensor, file: int, name: str, shape: tuple[int, ...], heads: int, added: float) -> GgufTensor:
    found = tuple(int(length) for length in reversed(tensor.shape))
    if found != shape and (found != (shape[0], *shape[2:]) or shape[1] != 1):  # a convolution's has no axis of 1
        raise ValueError(f"{name} is {found}, must be {shape}")
    offset, nbytes = int(tensor.data_offset), int(tensor.n_bytes)
    return GgufTensor(tensor.tensor_type.name, shape, offset, nbytes, heads, file, added)


def _is_known(kind: GGMLQuantizationType) -> bool:
    """Whether gguf knows the values that tensors of this kind stand for."""
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
