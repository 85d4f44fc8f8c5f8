"""Small models and the GGUF files that llama.cpp's own converter would make of them."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, RopeScalingType, TensorNameMap
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer, models, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = ["the cat sat on the mat in 1999 and 2024", "a  b   c    d", "naïve café 12345 déjà vu", "hello hello"]


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE with SmolLM2's pre-tokenizer, trained on a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIAL, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def tiny_llama(vocab_size: int) -> LlamaForCausalLM:
    """Two layers with grouped-query attention and tied embeddings, as SmolLM2 has them. Always the same weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def tiny_model(model_type: str, vocab_size: int, **changed: Any) -> Any:
    """A model like `tiny_llama`, of another family. Biases and norms are random too."""
    torch.manual_seed(0)
    fields: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if model_type != "gpt2":
        fields |= {"intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 256}
    fields |= {"pad_token_id": None, "eos_token_id": 2, "tie_word_embeddings": True, **changed}
    config = AutoConfig.for_model(model_type, vocab_size=vocab_size, **fields)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_()
    return model.eval()


def rounded(model: LlamaForCausalLM, kind: GGMLQuantizationType) -> LlamaForCausalLM:
    """A copy of `model` with the weights that it has after quantisation to `kind` and back."""
    copy = deepcopy(model)
    with torch.no_grad():
        for weight in copy.parameters():
            if weight.ndim == 2:
                weight.copy_(torch.from_numpy(dequantize(quantize(weight.numpy(), kind), kind)))
    return copy


def write_gguf(
    path: Path,
    model: Any,
    tokenizer: Tokenizer,
    *,
    split: str = "smollm",
    without: str = "",
    extra: str = "",
    rope_scaling: str | None = None,
    window: int | None = None,
    rotated: int | None = None,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    tensors_per_file: int = 0,
) -> None:
    """Write `model`, its matrices as `kind`. `without` leaves out one tensor and `extra` adds one; the others go into
    the metadata.
    """
    config: Any = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = GGUFWriter(path, architecture, split_max_tensors=tensors_per_file)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        kinds = getattr(config, "layer_types", None) if config.model_type == "lfm2" else None
        heads = config.num_key_value_heads
        writer.add_head_count_kv([heads * (kind != "conv") for kind in kinds] if kinds else heads)
        writer.add_key_length(getattr(config, "head_dim", config.hidden_size // config.num_attention_heads))
        writer.add_rope_freq_base(_rope(config)["rope_theta"])
        writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)
    if config.model_type == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    _add_fields(writer, config)
    if rope_scaling is not None:
        writer.add_string("llama.rope.scaling.type", rope_scaling)
    if window is not None:
        writer.add_sliding_window(window)
        writer.add_pad_token_id(0)  # the config's own is of a larger vocabulary
    if rotated is not None:
        writer.add_rope_dimension_count(rotated)
    _add_tokenizer(writer, tokenizer, split)
    _add_tensors(writer, model, without, kind)
    if extra:
        writer.add_tensor(extra, np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer, split: str) -> None:
    state = json.loads(tokenizer.to_str())["model"]
    texts = sorted(state["vocab"], key=state["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(texts)
    writer.add_token_types([3 if text in SPECIAL else 1 for text in texts])
    writer.add_token_merges([" ".join(pair) for pair in state["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


ARCHITECTURES = {"qwen3_moe": "qwen3moe", "gemma3_text": "gemma3", "gpt_oss": "gpt-oss"}
"""By `model_type`, where that is not llama.cpp's name."""


def _rope(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = config.rope_parameters.get("full_attention", config.rope_parameters)
    return found


def _add_fields(writer: GGUFWriter, config: Any) -> None:
    """Those of some architectures, as llama.cpp's converter writes them."""
    rope, kind = _rope(config) if config.model_type != "gpt2" else {}, config.model_type
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "llama3":
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config)
        plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / frequencies).numpy())
    if kind in ("gemma2", "gemma3_text", "gpt_oss"):
        writer.add_sliding_window(config.sliding_window)
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if kind in ("qwen3_moe", "gpt_oss"):
        writer.add_expert_count(config.num_local_experts if kind == "gpt_oss" else config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(
            config.intermediate_size if kind == "gpt_oss" else config.moe_intermediate_size
        )
    if kind == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if kind == "lfm2":
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if kind == "glm4":
        writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))


def _stored(name: str, values: np.ndarray, model_type: str) -> dict[str, np.ndarray]:
    """A parameter as llama.cpp's converter has it: experts' gates apart `[experts, out, in]`, norms of Gemma plus 1."""
    if model_type.startswith("gemma") and "norm" in name:
        return {name: values + 1}
    if ".experts." not in name:
        return {name: values[:, 0] if name.endswith("conv.conv.weight") else values}
    if model_type == "gpt_oss":
        values = values.swapaxes(1, 2) if values.ndim == 3 else values
        parts = [values[:, 0::2], values[:, 1::2]] if "gate_up" in name else [values]
    else:
        parts = np.split(values, 2, axis=1) if "gate_up" in name else [values]
    names = [name.replace("gate_up", each) for each in ("gate", "up")][: len(parts)]
    return {each: np.ascontiguousarray(part) for each, part in zip(names, parts, strict=True)}


def _add_tensors(writer: GGUFWriter, model: Any, without: str, kind: GGMLQuantizationType) -> None:
    config: Any = model.config
    architecture = ARCHITECTURES.get(config.model_type, config.model_type)
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = TensorNameMap(arch, config.num_hidden_layers)
    parts = {
        part: values
        for name, tensor in model.state_dict().items()
        if name != without and (name != "lm_head.weight" or not config.tie_word_embeddings)
        for part, values in _stored(name, tensor.numpy(), config.model_type).items()
    }
    for name, values in parts.items():
        interleaved = config.model_type in ("llama", "granite")
        if interleaved and name.endswith("q_proj.weight"):
            values = _interleave(values, config.num_attention_heads)
        if interleaved and name.endswith("k_proj.weight"):
            values = _interleave(values, config.num_key_value_heads)
        if ".c_" in name and name.endswith(".weight"):  # GPT-2's, stored [in, out]
            values = np.ascontiguousarray(values.T)
        base = name.removesuffix("_bias")
        gguf_name = names.get_name(base, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None
        if not gguf_name.endswith((".weight", ".bias")):
            gguf_name += ".weight" if base == name else ".bias"
        if values.ndim > 1 and kind != GGMLQuantizationType.F32 and base == name:
            writer.add_tensor(gguf_name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, values)


def _interleave(weights: np.ndarray, heads: int) -> np.ndarray:
    """From Transformers' rotary layout (halves) to GGUF's (pairs): `permute` of llama.cpp's convert_hf_to_gguf.py."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))
