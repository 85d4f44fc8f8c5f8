"""The families that run on `layers.decoder_layer`, and how they differ. A new one is a line of `VARIANTS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, cast

from app.gpu.models.feed_forward import PROJECTIONS, Mixture, Projections
from app.gpu.models.recurrent import READ, Folding, GatedDeltaNet, Mamba2, ShortConvolution
from app.model_store.saved import Config

Norms = tuple[str | None, str | None, str | None, str | None]
"""Names of the norms before and after attention, and before and after the feed-forward."""
_BEFORE: Norms = ("input_layernorm", None, "post_attention_layernorm", None)
_AFTER: Norms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_GEMMA: Norms = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_GLM4: Norms = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")


@dataclass(frozen=True, slots=True)
class Variant:
    """What differs between families. Of the fields in which configs differ only those count that it `reads`, as in
    Transformers' module of that name; without `layer_types`, a window is that of all layers.
    """

    reads: tuple[str, ...] = ()
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias whatever the config says."""
    output_bias: bool = True
    """Whether attention's output projection has a bias if queries have."""
    qk_norm: bool = False
    """Whether each head of queries and keys is normed."""
    wide_qk_norm: bool = False
    """Whether all heads of queries are normed together, and those of keys."""
    head_norm: str = "norm"
    """What it is called, behind `q_` and `k_`."""
    tokens: str = "model.embed_tokens.weight"
    layers: str = "model.layers"
    attention: str = "self_attn"
    final_norm: str = "model.norm"
    """What the embeddings, layers, their attention and the norm behind all of them are called."""
    positions: str | None = None
    """The table of learned positions, in place of a rotation."""
    turned: bool = False
    """Whether layers' matrices are stored `[in, out]` (Transformers' `Conv1D`), not `[out, in]`."""
    biased: bool = False
    """Whether all norms are layer norms, with a bias, and all projections have one too."""
    lone: bool = False
    """Whether a layer has one part, which mixes tokens or is a feed-forward, under the first norm."""
    output: str = "o_proj"
    """What attention's output projection is called."""
    mlp: str = "mlp"
    projections: Projections = PROJECTIONS
    """What the MLP and its matrices are called."""
    width: Callable[[Config], int] = lambda config: config.intermediate_size
    """The MLP's."""
    eps: str = "rms_norm_eps"
    """The field of the config with that of norms."""
    norms: Norms = _BEFORE
    one_more: bool = False
    """Whether norms multiply by their weight and one."""
    fused_qkv: str | None = None
    """What one matrix for queries, keys and values is called; None: the checkpoint has three."""
    interleaved: bool = False
    """Whether the two numbers that are rotated together are neighbours, not a half apart."""
    exact_angles: bool = False
    """Whether Transformers' module rounds once it has rotated; the others round their angles."""
    sinks: bool = False
    """Whether each head has a score that takes part in each softmax."""
    gated: bool = False
    """Whether what each head attends to is multiplied by a logistic function of a gate, which its query comes with."""
    latents: bool = False
    """Whether attention is `LatentAttention`."""
    folding: type[Folding] | None = None
    """What mixes tokens in layers that do not attend."""
    root_of_hidden: bool = False
    """Whether embeddings are multiplied by the root of the hidden size."""
    experts: Callable[[Config, int], Mixture | None] = lambda config, index: None
    """Those of a layer, by its number; None: it has one MLP."""


def _mixtral(config: Config, _index: int) -> Mixture:
    count, width = config.num_local_experts, config.intermediate_size
    return Mixture(count, config.num_experts_per_tok, width, module="block_sparse_moe", projections=_NUMBERED)


def _minimax_m2(config: Config, index: int) -> Mixture:
    return replace(_mixtral(config, index), sigmoid=True, correction="e_score_correction_bias")


def _olmoe(config: Config, _index: int) -> Mixture:
    count, width = config.num_experts, config.intermediate_size
    return Mixture(count, config.num_experts_per_tok, width, renormalized=config.norm_topk_prob)


def _qwen3_moe(config: Config, index: int) -> Mixture | None:
    if index in config.mlp_only_layers or config.num_experts == 0 or (index + 1) % config.decoder_sparse_step:
        return None
    return replace(_olmoe(config, index), width=config.moe_intermediate_size)


def _qwen2_moe(config: Config, index: int) -> Mixture | None:
    mixture, width = _qwen3_moe(config, index), config.shared_expert_intermediate_size
    return mixture and replace(mixture, shared="mlp.shared_expert", shared_width=width, shared_gate=_SHARED_GATE)


def _qwen3_5_moe(config: Config, _index: int) -> Mixture:
    mixture = Mixture(config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size)
    width = config.shared_expert_intermediate_size
    return replace(mixture, shared="mlp.shared_expert", shared_width=width, shared_gate=_SHARED_GATE)


def _gpt_oss(config: Config, _index: int) -> Mixture:
    mixture = Mixture(config.num_local_experts, config.num_experts_per_tok, config.intermediate_size, router="router")
    return replace(mixture, turned=True, clamp=(config.swiglu_alpha, config.swiglu_limit))


def _deepseek(config: Config, index: int) -> Mixture | None:
    return None if index < config.first_k_dense_replace else _moe_of_deepseek(config)


def _moe_of_deepseek(config: Config) -> Mixture:
    shared = config.n_shared_experts or 0
    return Mixture(
        config.n_routed_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        renormalized=config.norm_topk_prob,
        sigmoid=True,
        correction="gate.e_score_correction_bias",
        groups=config.n_group,
        top_groups=config.topk_group,
        scale=config.routed_scaling_factor,
        shared="mlp.shared_experts" if shared else None,
        shared_width=config.moe_intermediate_size * shared,
    )


def _deepseek_v2(config: Config, index: int) -> Mixture | None:
    mixture = _deepseek(config, index)
    return mixture and replace(mixture, sigmoid=False, correction=None, renormalized=False, groups=1, top_groups=1)


def _glm4_lite(config: Config, index: int) -> Mixture | None:
    return _moe_of_deepseek(config) if config.mlp_layer_types[index] == "sparse" else None


def _lfm2_moe(config: Config, index: int) -> Mixture | None:
    if index < config.num_dense_layers:
        return None
    return Mixture(
        config.num_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        module="feed_forward",
        projections=_NUMBERED,
        renormalized=config.norm_topk_prob,
        sigmoid=True,
        correction="expert_bias" if config.use_expert_bias else None,
        scale=config.routed_scaling_factor,
    )


def _granite_hybrid(config: Config, _index: int) -> Mixture | None:
    if not config.num_local_experts:
        return None
    return Mixture(
        config.num_local_experts,
        config.num_experts_per_tok,
        config.intermediate_size,
        module="block_sparse_moe",
        router="router.layer",
        merged=("input_linear.weight", "output_linear.weight"),
        shared="shared_mlp",
        shared_projections=_GRANITE,
        shared_width=config.shared_intermediate_size,
    )


def _nemotron(config: Config, index: int) -> Mixture | None:
    if config.layer_types[index] != "moe":
        return None
    return replace(
        _moe_of_deepseek(config),
        module="mixer",
        projections=_UNGATED,
        merged=("experts.up_proj", "experts.down_proj"),
        shared="mixer.shared_experts",
        shared_projections=_UNGATED,
        shared_width=config.moe_shared_expert_intermediate_size,
    )


_SHARED_GATE = "shared_expert_gate"
_UNGATED: Projections = None, "up_proj", "down_proj"
_FUSED: Projections = "gate_up_proj", "gate_up_proj", "down_proj"
_GRANITE: Projections = "input_linear", "input_linear", "output_linear"
_NUMBERED: Projections = "w1", "w3", "w2"
_HYBRID = Variant(
    ("attention_bias", "layer_types", "partial_rotary_factor"),
    qk_norm=True,
    one_more=True,
    gated=True,
    folding=GatedDeltaNet,
)


def _lfm2_width(config: Config) -> int:
    """As Transformers computes it."""
    width: int = config.intermediate_size
    if config.block_auto_adjust_ff_dim:
        width, step = int(2 * width / 3), config.block_multiple_of
        if config.block_ffn_dim_multiplier is not None:
            width = -(-int(config.block_ffn_dim_multiplier * width) // step) * step
    return width


_SHORT = Variant(
    ("layer_types",),
    qk_norm=True,
    head_norm="layernorm",
    output="out_proj",
    mlp="feed_forward",
    projections=_NUMBERED,
    eps="norm_eps",
    norms=("operator_norm", None, "ffn_norm", None),
    final_norm="model.embedding_norm",
    folding=ShortConvolution,
)
_LONE = Variant(
    ("layer_types",),
    tokens="backbone.embeddings.weight",
    layers="backbone.layers",
    final_norm="backbone.norm_f",
    attention="mixer",
    mlp="mixer",
    lone=True,
    eps="layer_norm_epsilon",
    norms=("norm", None, None, None),
    folding=Mamba2,
)
_BAMBA = Variant(
    ("attention_bias", "mlp_bias", "layer_types", "partial_rotary_factor"),
    mlp="feed_forward",
    norms=("input_layernorm", None, "pre_ff_layernorm", None),
    final_norm="model.final_layernorm",
    folding=Mamba2,
)
_MULTIPLIERS = "attention_multiplier", "residual_multiplier", "embedding_multiplier", "logits_scaling"
_FALCON: tuple[str, ...] = (
    "lm_head_multiplier",
    "mlp_multipliers",
    "key_multiplier",
    "attention_in_multiplier",
    "mamba_rms_norm",
)
_FALCON += "attention_out_multiplier", "ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier", "mamba_d_ssm"
_GEMMA_FIELDS = "attention_bias", "layer_types", "hidden_activation", "query_pre_attn_scalar", "final_logit_softcapping"
VARIANTS = {
    "gpt2": Variant(
        ("activation_function", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
        tokens="transformer.wte.weight",
        positions="transformer.wpe.weight",
        layers="transformer.h",
        attention="attn",
        final_norm="transformer.ln_f",
        turned=True,
        biased=True,
        fused_qkv="c_attn",
        output="c_proj",
        projections=(None, "c_fc", "c_proj"),
        width=lambda config: config.n_inner or 4 * config.hidden_size,
        eps="layer_norm_epsilon",
        norms=("ln_1", None, "ln_2", None),
    ),
    "llama": Variant(("attention_bias", "mlp_bias")),
    "mistral": Variant(("sliding_window",)),
    "mixtral": Variant(("sliding_window",), experts=_mixtral),
    "minimax_m2": Variant(("partial_rotary_factor",), wide_qk_norm=True, experts=_minimax_m2),
    "qwen2": Variant(("layer_types",), qkv_bias=True),
    "qwen2_moe": Variant(("qkv_bias", "layer_types"), output_bias=False, experts=_qwen2_moe),
    "qwen3": Variant(("attention_bias", "layer_types"), qk_norm=True),
    "qwen3_moe": Variant(("attention_bias", "sliding_window"), qk_norm=True, experts=_qwen3_moe),
    "qwen3_next": replace(_HYBRID, experts=_qwen2_moe),
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": replace(_HYBRID, experts=_qwen3_5_moe),
    "lfm2": replace(_SHORT, width=_lfm2_width),
    "lfm2_moe": replace(_SHORT, experts=_lfm2_moe),
    "bamba": _BAMBA,
    "falcon_h1": replace(_BAMBA, reads=("attention_bias", "mlp_bias", "layer_types", "embedding_multiplier", *_FALCON)),
    "mamba2": _LONE,
    "nemotron_h": replace(
        _LONE,
        reads=("attention_bias", "mlp_bias", "layer_types", "mlp_hidden_act"),
        projections=_UNGATED,
        experts=_nemotron,
    ),
    "dots1": Variant(("attention_bias", "layer_types"), qk_norm=True, experts=_deepseek),
    "deepseek_v2": Variant(("attention_bias", "mlp_bias"), latents=True, exact_angles=True, experts=_deepseek_v2),
    "deepseek_v3": Variant(("attention_bias", "rope_interleave"), latents=True, experts=_deepseek),
    "glm4_moe_lite": Variant(("attention_bias", "rope_interleave"), latents=True, experts=_glm4_lite),
    "youtu": Variant(("attention_bias", "rope_interleave"), latents=True),
    "smollm3": Variant(("attention_bias", "mlp_bias", "layer_types", "no_rope_layers")),
    "seed_oss": Variant(("attention_bias", "attention_out_bias", "mlp_bias")),
    "ernie4_5": Variant(("use_bias",), interleaved=True),
    "helium": Variant(("attention_bias", "mlp_bias"), output_bias=False, interleaved=True),
    "granite": Variant(("attention_bias", "mlp_bias", *_MULTIPLIERS)),
    "granitemoehybrid": Variant(
        ("attention_bias", "layer_types", "position_embedding_type", *_MULTIPLIERS),
        mlp="shared_mlp",
        projections=_GRANITE,
        width=lambda config: config.shared_intermediate_size,
        folding=Mamba2,
        experts=_granite_hybrid,
    ),
    "olmo2": Variant(("attention_bias",), wide_qk_norm=True, norms=_AFTER, exact_angles=True),
    "olmo3": Variant(("attention_bias", "layer_types"), wide_qk_norm=True, norms=_AFTER, exact_angles=True),
    "olmoe": Variant(("attention_bias",), wide_qk_norm=True, experts=_olmoe),
    "gpt_oss": Variant(("attention_bias", "layer_types"), sinks=True, experts=_gpt_oss),
    "phi3": Variant(("sliding_window", "partial_rotary_factor"), fused_qkv="qkv_proj", projections=_FUSED),
    "glm": Variant(
        ("attention_bias", "partial_rotary_factor"), output_bias=False, interleaved=True, projections=_FUSED
    ),
    "glm4": Variant(
        ("attention_bias", "partial_rotary_factor"),
        output_bias=False,
        interleaved=True,
        projections=_FUSED,
        norms=_GLM4,
    ),
    "glm4_moe": Variant(
        ("attention_bias", "partial_rotary_factor", "use_qk_norm"), output_bias=False, experts=_deepseek
    ),
    "gemma": Variant(("attention_bias",), one_more=True, root_of_hidden=True),
    "gemma2": Variant((*_GEMMA_FIELDS, "attn_logit_softcapping"), norms=_GEMMA, one_more=True, root_of_hidden=True),
    "gemma3_text": Variant(_GEMMA_FIELDS, qk_norm=True, norms=_GEMMA, one_more=True, root_of_hidden=True),
}
"""By `model_type`."""


_ALWAYS = {
    *("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "max_position_embeddings", "hidden_act"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window", "rope_parameters", "rms_norm_eps"),
    *("tie_word_embeddings", "clip_qkv", "use_bidirectional_attention", "num_mtp_layers"),
    *("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("decoder_sparse_step", "mlp_only_layers", "first_k_dense_replace", "norm_topk_prob", "routed_scaling_factor"),
    *("n_group", "topk_group", "n_shared_experts", "shared_expert_intermediate_size", "swiglu_alpha", "swiglu_limit"),
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
    *("conv_L_cache", "conv_bias", "norm_eps"),
    *("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"),
    *("num_dense_layers", "use_expert_bias", "shared_intermediate_size", "mlp_layer_types"),
    *("n_positions", "n_embd", "n_layer", "n_head", "n_inner"),
    *("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    *READ,
    *("layers_block_type", "mamba_norm_before_gate", "moe_shared_expert_intermediate_size"),
}
"""Fields of configs that all variants read which have them."""
_WITHOUT_EFFECT = {
    *("initializer_range", "attention_dropout", "residual_dropout", "embd_pdrop", "resid_pdrop", "router_jitter_noise"),
    *("output_router_logits", "router_aux_loss_coef", "use_cache", "pretraining_tp"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "original_max_position_embeddings"),
    *("use_sliding_window", "max_window_layers", "no_rope_layer_interval", "full_attn_idxs", "attn_layer_indices"),
    *("mamba_expand", "mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient", "expand", "chunk_size"),
    *("time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual"),
    *("residual_in_fp32", "use_mamba_kernels", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "hidden_dropout"),
    *("attn_pdrop", "reorder_and_upcast_attn", "add_cross_attention", "summary_type", "summary_use_proj"),
    *("summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
    *("num_nextn_predict_layers", "mtp_layers_block_type", "embedding_initializer_range"),
}
"""Those that matter in training or to tokens alone, or of which the config has made others."""


def unread(config: Config) -> list[str]:
    """Fields that Transformers declares for the family, that are not at their default, and that no layer of ours reads.
    Those that it does not declare, its modules do not read either.
    """
    known, kind = {*VARIANTS[config.model_type].reads, *_ALWAYS, *_WITHOUT_EFFECT}, cast("Any", type(config))
    if not is_dataclass(kind):  # a saved one, which Djinn has made of a file of a known form
        return []
    bases = [each for each in type(config).__mro__ if each.__module__ == "transformers.configuration_utils"]
    general = {each.name for base in bases if is_dataclass(base) for each in fields(base)}
    own = [each for each in fields(kind) if each.name not in known | general]
    made = [(each, each.default if each.default_factory is MISSING else each.default_factory()) for each in own]
    return [each.name for each, default in made if _fixed(getattr(config, each.name, default)) != _fixed(default)]


def _fixed(value: Any) -> Any:
    """A field as it is compared: a config has a list where its file has one."""
    return tuple(value) if isinstance(value, list) else value


def read(config: Config, name: str, default: Any = None) -> Any:
    """A field of the config, or `default` if its family does not read it."""
    return getattr(config, name) if name in VARIANTS[config.model_type].reads else default


def is_variant(config: Config) -> bool:
    """Whether the model's layers are such. Transformers' modules run those that clip what they project, fold with
    another activation than SiLU, norm what they read before it is gated, scale an input beside a bias, or have a field
    that is `unread`. They refuse those that see what comes later.
    """
    variant, clipped = VARIANTS.get(config.model_type), getattr(config, "clip_qkv", None) is not None
    if variant is None or clipped or getattr(config, "use_bidirectional_attention", False):
        return False
    other = getattr(config, "mamba_rms_norm", False) and config.mamba_norm_before_gate
    other |= getattr(config, "ssm_in_multiplier", 1.0) != 1 and config.mamba_proj_bias
    folds_alike = variant.folding is None or getattr(config, "hidden_act", "silu") == "silu"
    return not unread(config) and folds_alike and not other


def has_turned_matrices(config: Config) -> bool:
    """Whether matrices of layers, or experts' alone, are stored with their inputs as rows."""
    variant = VARIANTS[config.model_type]
    mixture = variant.experts(config, 0) if is_variant(config) else None
    return variant.turned or (mixture is not None and mixture.turned)
