"""Small models and the GGUF files that llama.cpp's own converter would make of them."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, TensorNameMap
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer, models, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

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


def tiny_model(model_type: str, vocab_size: int) -> Any:
    """A model like `tiny_llama`, of another family. Biases and norms are random too."""
    torch.manual_seed(0)
    fields: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    if model_type != "gpt2":
        fields |= {"intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 256}
    fields |= {"pad_token_id": None, "eos_token_id": 2}
    config = AutoConfig.for_model(model_type, vocab_size=vocab_size, tie_word_embeddings=True, **fields)
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
) -> None:
    """Write `model`, its matrices as `kind`. `without` leaves out one tensor and `extra` adds one; the others go into
    the metadata.
    """
    config: Any = model.config
    writer = GGUFWriter(path, config.model_type)
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
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(getattr(config, "head_dim", config.hidden_size // config.num_attention_heads))
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.model_type == "llama":
        writer.add_rope_dimension_count(config.head_dim)
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


def _add_tensors(writer: GGUFWriter, model: Any, without: str, kind: GGMLQuantizationType) -> None:
    config: Any = model.config
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == config.model_type)
    names = TensorNameMap(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name in ("lm_head.weight", without):
            continue
        values = tensor.numpy()
        llama = config.model_type == "llama"
        if llama and name.endswith("q_proj.weight"):
            values = _interleave(values, config.num_attention_heads)
        if llama and name.endswith("k_proj.weight"):
            values = _interleave(values, config.num_key_value_heads)
        if ".c_" in name and name.endswith(".weight"):  # GPT-2's, stored [in, out]
            values = np.ascontiguousarray(values.T)
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None
        if values.ndim == 2 and kind != GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, values)


def _interleave(weights: np.ndarray, heads: int) -> np.ndarray:
    """From Transformers' rotary layout (halves) to GGUF's (pairs): `permute` of llama.cpp's convert_hf_to_gguf.py."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))
