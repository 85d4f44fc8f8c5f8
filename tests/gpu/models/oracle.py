"""Tiny models with weights that matter, and what Transformers itself computes with them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Cache, PretrainedConfig

VOCAB = 67
_AUTO: Any = AutoModelForCausalLM
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SMALL = {**_SPECIAL, "vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 3}
_GQA = {
    **_SMALL,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_WINDOW = 9
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_WINDOWS = {"sliding_window": _WINDOW, "layer_types": _MIXED}
_GEMMA4 = {"head_dim": 8, "global_head_dim": 16, "sliding_window": _WINDOW}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN_ROPE = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GROUPS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1}
_GROUPS |= {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "norm_topk_prob": True}
_LATENTS = {**_GQA, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 24, "qk_rope_head_dim": 8}
_LATENTS |= {"qk_nope_head_dim": 12, "v_head_dim": 20}
_GPT2 = {**_SPECIAL, "vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 128}


def _of(model_type: str, *parts: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """A config of this type: all that the parts say, and these fields."""
    config: dict[str, Any] = {"model_type": model_type}
    for part in (*parts, fields):
        config |= part
    return config


CASES: dict[str, dict[str, Any]] = {
    "llama": _of("llama", _GQA),
    "llama-tied-biased-wide-heads": _of(
        "llama", _GQA, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=16
    ),
    "llama-llama3-rope": _of("llama", _GQA, rope_parameters=_LLAMA3_ROPE),
    "llama-yarn-rope": _of("llama", _GQA, rope_parameters=_YARN_ROPE),
    "mistral-window": _of("mistral", _GQA, sliding_window=_WINDOW),
    "qwen2": _of("qwen2", _GQA),
    "qwen2-window": _of("qwen2", _GQA, use_sliding_window=True, sliding_window=_WINDOW, max_window_layers=1),
    "qwen3": _of("qwen3", _GQA, head_dim=16),
    "smollm3": _of("smollm3", _GQA, no_rope_layer_interval=2),
    "olmo2": _of("olmo2", _GQA),
    "olmo2-biased-llama3-rope": _of("olmo2", _GQA, attention_bias=True, rope_parameters=_LLAMA3_ROPE),
    "phi3": _of("phi3", _GQA),
    "phi3-window": _of("phi3", _GQA, sliding_window=_WINDOW),
    "gpt2": _of("gpt2", _GPT2),
    "gpt2-relu": _of("gpt2", _GPT2, activation_function="relu"),
    "gpt2-scaled-by-layer": _of("gpt2", _GPT2, scale_attn_by_inverse_layer_idx=True, n_inner=72),
    "gpt_neox": _of("gpt_neox", _GQA, rotary_pct=0.5),
    "gemma": _of("gemma", _GQA, head_dim=16),
    "gemma2": _of("gemma2", _GQA, _WINDOWS, head_dim=16),
    "vaultgemma": _of("vaultgemma", _GQA, _WINDOWS, head_dim=16),
    "gemma3": _of("gemma3_text", _GQA, _WINDOWS, head_dim=16),
    "mixtral": _of("mixtral", _GQA, num_local_experts=4),
    "qwen2_moe, dense and shared": _of(
        "qwen2_moe", _GQA, _EXPERTS, shared_expert_intermediate_size=40, mlp_only_layers=[1]
    ),
    "qwen3_moe": _of("qwen3_moe", _GQA, _EXPERTS, head_dim=16, norm_topk_prob=True),
    "olmoe": _of("olmoe", _GQA, _EXPERTS),
    "glm": _of("glm", _GQA, head_dim=16, attention_bias=True),
    "glm4": _of("glm4", _GQA, head_dim=16),
    "glm4_moe, groups": _of("glm4_moe", _GQA, _GROUPS, head_dim=16, use_qk_norm=True),
    "seed_oss": _of("seed_oss", _GQA, head_dim=16),
    "ernie4_5": _of("ernie4_5", _GQA, head_dim=16, use_bias=True),
    "helium": _of("helium", _GQA, head_dim=12),
    "granite": _of(
        "granite", _GQA, embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.2, logits_scaling=2.0
    ),
    "olmo3": _of("olmo3", _GQA, _WINDOWS),
    "phi3, rotated in part": _of(
        "phi3", _GQA, rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    ),
    "gemma4, heads of two sizes": _of(
        "gemma4_text",
        _GQA,
        _GEMMA4,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        layer_types=[*_MIXED[:2], _MIXED[1]],
    ),
    "gpt_oss, sinks": _of("gpt_oss", _GQA, _WINDOWS, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3, latents": _of(
        "deepseek_v3",
        _LATENTS,
        _GROUPS,
        q_lora_rank=32,
        rope_parameters={**_YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    "deepseek_v2": _of("deepseek_v2", _LATENTS, _GROUPS, n_group=1, q_lora_rank=None),
    "glm4_moe_lite": _of("glm4_moe_lite", _LATENTS, n_routed_experts=4, moe_intermediate_size=24),
    "youtu": _of("youtu", _LATENTS, rope_interleave=False),
    "minicpm3, keys wider than values": _of("minicpm3", _LATENTS),
    "stablelm, keywords dropped": _of("stablelm", _GQA, hidden_size=64),
    "phimoe, window in the mask": _of("phimoe", _GQA, sliding_window=_WINDOW, num_local_experts=4),
}
_CHUNKED = ["chunked_attention", "full_attention", "chunked_attention"]
_PER_LAYER = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 1}
BY_ROWS: dict[str, dict[str, Any]] = {
    "gptj": _of("gptj", _GPT2, rotary_dim=8),
    "codegen": _of("codegen", _GPT2, rotary_dim=8),
    "bloom": _of("bloom", _SPECIAL, vocab_size=VOCAB, hidden_size=48, n_layer=3, n_head=4),
    "falcon": _of("falcon", _GQA, multi_query=True),
    "falcon, biased by distance": _of("falcon", _GQA, multi_query=False, alibi=True),
    "mpt": _of("mpt", vocab_size=VOCAB, d_model=48, n_layers=3, n_heads=4, max_seq_len=128),
    "doge, masks made of values": _of("doge", _GQA, keep_window_size=30),
    "diffllama, two attentions": _of("diffllama", _GQA),
    "llama4, chunks": _of(
        "llama4_text",
        _GQA,
        head_dim=12,
        intermediate_size_mlp=80,
        num_local_experts=2,
        layer_types=_CHUNKED,
        no_rope_layers=[1, 0, 1],
        attention_chunk_size=8,
        floor_scale=4,
    ),
}
"""Those whose modules attend by themselves."""
CASES |= BY_ROWS
CASES |= {
    "gemma4, embeddings of each layer": _of(
        "gemma4_text", _GQA, _GEMMA4, _PER_LAYER, layer_types=["sliding_attention", "full_attention", "full_attention"]
    ),
    "gemma3n, several streams": _of(
        "gemma3n_text",
        _GQA,
        _PER_LAYER,
        head_dim=16,
        laurel_rank=8,
        activation_sparsity_pattern=[0.5, 0.0, 0.0],
        sliding_window=_WINDOW,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    ),
    "dots1": _of(
        "dots1",
        _GQA,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
    ),
    "minimax_m2": _of("minimax_m2", _GQA, head_dim=16, rotary_dim=8, num_local_experts=4, num_experts_per_tok=2),
}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_MUP = {"ssm_multipliers": [0.5, 0.7, 2.0, 1.5, 1.1], "ssm_in_multiplier": 0.9, "ssm_out_multiplier": 1.2}
_MUP |= {"attention_in_multiplier": 0.8, "attention_out_multiplier": 0.7, "key_multiplier": 0.6}
_MUP |= {"mlp_multipliers": [0.5, 1.5], "lm_head_multiplier": 0.5, "embedding_multiplier": 3.0}
_NEMOTRON = {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "head_dim": 12, "n_groups": 2}
_NEMOTRON |= {"mamba_num_heads": 8, "mamba_head_dim": 12, "ssm_state_size": 8, "chunk_size": 8}
_NEMOTRON |= {"moe_shared_expert_intermediate_size": 40, "time_step_min": 1e-6}  # single tokens' steps are not clamped
_MAMBA = {**_SMALL, "state_size": 8}
_HYBRID = {**_GQA, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "use_mamba_kernels": False}
FOLDING: dict[str, dict[str, Any]] = {
    "qwen3_next": _of("qwen3_next", _HYBRID, _DELTA, _EXPERTS, head_dim=16),
    "qwen3_5": _of("qwen3_5_text", _HYBRID, _DELTA, head_dim=16),
    "qwen3_5_moe": _of("qwen3_5_moe_text", _HYBRID, _DELTA, _EXPERTS, head_dim=16, shared_expert_intermediate_size=40),
    "granite 4": _of("granitemoehybrid", _HYBRID, _MAMBA2, _EXPERTS, embedding_multiplier=3.0),
    "bamba": _of("bamba", _GQA, _MAMBA2, mamba_n_groups=2, attn_layer_indices=[1]),
    "falcon_h1, both in a layer": _of("falcon_h1", _GQA, _MAMBA2, _MUP, mamba_d_ssm=96),
    "nemotron_h, one part in a layer": _of("nemotron_h", _GQA, _GROUPS, _NEMOTRON),
    "lfm2": _of("lfm2", _GQA, layer_types=["conv", "full_attention", "conv"]),
    "lfm2_moe": _of("lfm2_moe", _GQA, _EXPERTS, layer_types=["conv", "full_attention", "conv"]),
    "minimax": _of("minimax", _HYBRID, _EXPERTS, block_size=8),
    "jamba": _of("jamba", _GQA, _JAMBA),
    "kimi_linear": _of(
        "kimi_linear",
        _HYBRID,
        _EXPERTS,
        num_key_value_heads=4,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=12,
        v_head_dim=12,
        linear_head_dim=12,
        linear_num_heads=4,
    ),
    "zamba2, embeddings read again": _of(
        "zamba2",
        _GQA,
        num_key_value_heads=4,
        layers_block_type=["linear_attention", "hybrid", "hybrid"],
        mamba_d_state=8,
        n_mamba_heads=8,
        time_step_min=1e-6,  # steps of one token are clamped to no least time
        num_mem_blocks=2,
        adapter_rank=4,
        chunk_size=64,
    ),
    "rwkv": _of("rwkv", _SMALL, rescale_every=2),
    "mamba": _of("mamba", _MAMBA),
    "mamba2": _of("mamba2", _MAMBA, num_heads=8, head_dim=12, n_groups=1, chunk_size=8),
}
"""Those with layers that fold tokens into a state, alone or beside attention."""
CASES |= FOLDING


def tiny_config(case: str) -> PretrainedConfig:
    """The config of one of `CASES`."""
    config: PretrainedConfig = AutoConfig.for_model(**CASES[case])
    return config


def build_model(config: PretrainedConfig, auto: Any = _AUTO) -> Any:
    """Transformers' model of `config`, float32, with weights large enough that each shows in the logits."""
    with torch.random.fork_rng():
        torch.manual_seed(1)  # vectors are drawn too: how fast heads forget
        model = auto.from_config(config, attn_implementation="eager").eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * 0.2
        parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    for name, buffer in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)
    return model


def save_model(model: Any, folder: Path, **options: Any) -> Path:
    """Write `model` as safetensors, and return `folder`."""
    model.save_pretrained(folder, **options)
    return folder


@dataclass(frozen=True)
class Expected:
    """For one sequence: `boundaries[k]` is `[tokens, hidden]` before layer k; `logits` is `[tokens, vocab]`."""

    boundaries: list[Tensor]
    logits: Tensor


def expect(model: Any, tokens: Tensor, cache: Cache | None = None) -> Expected:
    """What `model` computes for one whole sequence, with keys and values out of `cache`. The last boundary is taken
    before the final norm.
    """
    within = (model.get_decoder(), *model.modules())  # Llama 4 does not tell its decoder
    layers = next(child for each in within for child in each.children() if isinstance(child, nn.ModuleList))
    last: list[Tensor] = []
    handle = layers[-1].register_forward_hook(
        lambda module, inputs, output: last.append(output[0] if isinstance(output, tuple) else output)
    )
    output = model(
        input_ids=tokens[None], past_key_values=cache, use_cache=cache is not None, output_hidden_states=True
    )
    handle.remove()
    boundaries = [*output.hidden_states[:-1], last[0]]
    if model.config.model_type.startswith(("mamba", "rwkv")):  # its own hidden states begin behind the first layer
        boundaries = [model.get_input_embeddings()(tokens[None]), *output.hidden_states[:-1]]
    if boundaries[0].dim() == 4:  # several streams
        boundaries = [boundary.permute(1, 2, 0, 3).flatten(2) for boundary in boundaries]
    return Expected([boundary[0] for boundary in boundaries], output.logits[0])
