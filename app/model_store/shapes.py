"""`random:SHAPE` models: the published sizes of well-known models, and tiny ones for tests."""

from __future__ import annotations

from typing import Any, cast

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from app.domain.errors import UnknownModel
from app.model_store.saved import Config, ModelTokenizer, SavedConfig

BOS_ID, EOS_ID, IM_START_ID, IM_END_ID = 256, 257, 258, 259
_SPECIAL = ("<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
MIN_VOCAB_SIZE = 256 + len(_SPECIAL)

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The printable character for each byte 0..255 in a byte-level vocabulary, as GPT-2 chose it."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def byte_tokenizer(vocab_size: int) -> ModelTokenizer:
    """Token b is byte b; then the four special tokens; every further id below `vocab_size` decodes to `<id>`.

    Encoding never produces those further tokens: they are there so that whatever a random model samples
    has a text. `vocab_size` is at least `MIN_VOCAB_SIZE`.
    """
    texts = [*byte_alphabet(), *_SPECIAL, *(f"<{token_id}>" for token_id in range(MIN_VOCAB_SIZE, vocab_size))]
    backend = Tokenizer(models.BPE(vocab={text: token_id for token_id, text in enumerate(texts)}, merges=[]))
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in _SPECIAL])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS_ID)]
    )
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    return ModelTokenizer(backend, special, BOS_ID, EOS_ID, _CHAT_TEMPLATE, None)


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    """The fields in which the models of the Llama family differ, under the names of their `config.json`."""
    theta = others.pop("rope_theta", 10_000.0)
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": False,
        **others,
    }


def _gpt2(hidden: int, layers: int, heads: int, vocab_size: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": 1024,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
    }


def _hybrid(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    """A Qwen3.5 of that size: every fourth layer attends, the others fold tokens into as many matrices as it has heads,
    as wide as these.
    """
    width = hidden // heads
    rope = {"rope_type": "default", "rope_theta": others.pop("rope_theta"), "partial_rotary_factor": 0.25}
    kinds = ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(layers)]
    return {
        **_llama(hidden, inner, layers, heads, kv_heads, **others),
        "model_type": "qwen3_5_text",
        "rope_parameters": rope,
        "layer_types": kinds,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": width,
        "linear_value_head_dim": width,
    }


def _mixture(
    hidden: int, width: int, count: int, chosen: int, layers: int, heads: int, **others: Any
) -> dict[str, Any]:
    """A Qwen3 whose tokens visit `chosen` of `count` experts in each layer."""
    return {
        **_llama(hidden, width, layers, heads, heads // 2, **others),
        "model_type": "qwen3_moe",
        "num_experts": count,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


_LLAMA_2 = {"vocab_size": 32_000, "max_position_embeddings": 4096}
_LLAMA_3 = {"vocab_size": 128_256, "max_position_embeddings": 8192, "rope_theta": 500_000.0}
_MISTRAL = {"vocab_size": 32_768, "max_position_embeddings": 32_768, "rope_theta": 1_000_000.0}
_SMOLLM2 = {"vocab_size": 49_152, "max_position_embeddings": 8192, "rope_theta": 100_000.0}
_ALL_FULL = 4 * ["full_attention"]
_TINY = {"vocab_size": 512, "max_position_embeddings": 1024}

# Published ones are from the config.json of gpt2, Llama-2-7b and -13b, Mistral-7B-v0.3, Meta-Llama-3-8B and -70B,
# SmolLM2-135M-Instruct.
_SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": _gpt2(768, 12, 12, 50_257),
    "llama-2-7b": _llama(4096, 11_008, 32, 32, 32, **_LLAMA_2),
    "llama-2-13b": _llama(5120, 13_824, 40, 40, 40, **_LLAMA_2),
    "mistral-7b": _llama(4096, 14_336, 32, 32, 8, model_type="mistral", **_MISTRAL),
    "llama-3-8b": _llama(4096, 14_336, 32, 32, 8, **_LLAMA_3),
    "llama-3-70b": _llama(8192, 28_672, 80, 64, 8, **_LLAMA_3),
    "smollm2-135m": _llama(576, 1536, 30, 9, 3, tie_word_embeddings=True, **_SMOLLM2),
    "hybrid-135m": _hybrid(576, 1536, 30, 9, 3, tie_word_embeddings=True, **_SMOLLM2),
    "experts-400m": _mixture(512, 256, 64, 4, 16, 8, vocab_size=4096, max_position_embeddings=8192),
    "tiny-llama": _llama(64, 128, 4, 4, 2, **_TINY),
    "tiny-mistral": _llama(64, 128, 4, 4, 2, model_type="mistral", **_TINY),
    "tiny-qwen3": _llama(64, 128, 4, 4, 2, model_type="qwen3", layer_types=_ALL_FULL, **_TINY),
    "tiny-gpt2": _gpt2(64, 4, 4, 512),
    "tiny-hybrid": _hybrid(64, 128, 4, 4, 2, rope_theta=10_000.0, vocab_size=512, max_position_embeddings=4096),
}

SHAPE_NAMES = tuple(_SHAPES)


def shape_config(shape: str) -> Config:
    """The config of `shape`, with all that Djinn's own stacks read of it and the special token ids of the byte
    tokenizer. Transformers' `AutoConfig.for_model` takes its entries.

    Raises UnknownModel, which lists the shapes there are.
    """
    if shape not in _SHAPES:
        raise UnknownModel(f"no shape {shape!r} for random:SHAPE; there are {', '.join(SHAPE_NAMES)}", param="model")
    entries = {**_SHAPES[shape], "initializer_range": 0.02, "bos_token_id": BOS_ID, "eos_token_id": [EOS_ID, IM_END_ID]}
    return cast("Config", SavedConfig(**entries))
