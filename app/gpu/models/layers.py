"""Layers of the families in `variants`: what mixes tokens, then a feed-forward, each with its norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.domain.points import Point, PointShape
from app.gpu.kernels.attention.base import Attention, AttentionSpec, Batch
from app.gpu.models.base import require_fixed_rope
from app.gpu.models.elementwise import add_, add_rms_norm, gate_, layer_norm, rms_norm, rotate, scale_
from app.gpu.models.feed_forward import experts, mlp
from app.gpu.models.latent_attention import LatentAttention
from app.gpu.models.parts import Layer, Parts, attention_points, head_dim_of, kv_heads_of
from app.gpu.models.recurrent import Folding
from app.gpu.models.variants import VARIANTS, read
from app.gpu.weights.bundles import Weights
from app.model_store.saved import Config

_FOLDING = "linear_attention", "conv", "hybrid"
"""Types of layers that fold tokens into a state; a hybrid one attends beside that."""
_MIX_NOTHING = "mlp", "moe"
"""Those that have a feed-forward alone."""
Tables = Mapping[str | None, Tensor]
"""By the type of a layer, or one under None for layers of all types."""


def rotary_tables(config: Config, positions: int, weights: Weights) -> Tables:
    """Cosines, then sines, of half of what is rotated of a head, `[positions, rotated]`, for rotary position embedding
    (Su et al., arXiv:2104.09864) with Transformers' own frequencies and scaling. Raises as `require_fixed_rope`, and
    FieldOutOfRange if more would be rotated than a head has.
    """
    require_fixed_rope(config)
    if not getattr(config, "rope_parameters", None):
        return {}
    exact = VARIANTS[config.model_type].exact_angles
    dtype, at = torch.float32 if exact else weights.dtype, torch.arange(positions, device=weights.device)
    by_type = {kind: given for kind, given in config.rope_parameters.items() if isinstance(given, dict)}
    tables = dict[str | None, Tensor]()
    most = config.qk_rope_head_dim if VARIANTS[config.model_type].latents else head_dim_of(config)
    for layer_type, parameters in (by_type or {None: config.rope_parameters}).items():
        frequencies, scale = _frequencies(config, layer_type, parameters)
        if 2 * len(frequencies) > most:  # kernels trust the table
            said = f"config.json: {2 * len(frequencies)} numbers of each head are to be rotated, and it has {most}"
            raise FieldOutOfRange(said, param="model")
        angles = at[:, None].float() * frequencies.to(weights.device, torch.float32)
        tables[layer_type] = torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1).to(dtype)
    return tables


def _frequencies(config: Config, layer_type: str | None, parameters: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Those of a type of layers, and what their cosines and sines are multiplied by."""
    if parameters["rope_type"] != "default":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        if parameters["rope_type"] not in ROPE_INIT_FUNCTIONS:
            known = ", ".join(sorted(ROPE_INIT_FUNCTIONS))
            said = f"config.json: rope_type {parameters['rope_type']!r} is not known; known are default, {known}"
            raise FieldOutOfRange(said, param="model")
        return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](cast("Any", config), layer_type=layer_type)
    partial = parameters.get("partial_rotary_factor", 1.0)
    partial = partial if "partial_rotary_factor" in VARIANTS[config.model_type].reads else 1.0
    width = int(head_dim_of(config) * partial)
    exponents = torch.arange(0, width, 2, dtype=torch.float) / width
    return 1.0 / (parameters["rope_theta"] ** exponents), 1.0


class SelfAttention:
    """Grouped-query attention: one projection to queries, keys and values, of which the first two are rotated together.
    Where heads have gates, those come first.
    """

    def __init__(self, attention: Attention, tables: Tables, index: int, parts: Parts, name: str) -> None:
        """`tables` are the `rotary_tables`; `name` is that of the layer."""
        config, variant, hidden = parts.config, VARIANTS[parts.config.model_type], parts.config.hidden_size
        heads, kv_heads, self._head_dim = config.num_attention_heads, kv_heads_of(config), head_dim_of(config)
        self._heads, self._kv_heads = parts.shard.share(heads), parts.shard.share(kv_heads)
        self._gates, self._eps = self._heads if variant.gated else 0, _eps(config)
        table = tables.get(None, tables.get(_layer_type(config, index)))
        rotates = read(config, "no_rope_layers", {index: 1})[index] and read(config, "position_embedding_type", "rope")
        self._table = table if rotates else None
        self._attention, self._spec = attention, _spec(config, index, self._head_dim)
        self._sinks, module = None, f"{name}.{variant.attention}"
        if variant.sinks:
            sinks = parts.source.take(f"{module}.sinks", (heads,)).float()
            self._sinks = parts.bundle.hold(parts.shard.values(sinks))
        bias = variant.biased or read(config, "attention_bias", False) or read(config, "use_bias", False)
        qkv_bias = variant.qkv_bias or bias or read(config, "qkv_bias", False)
        output_bias = read(config, "attention_out_bias", bias and variant.output_bias)
        sizes = {"q": heads * self._head_dim, "k": kv_heads * self._head_dim, "v": kv_heads * self._head_dim}
        qkv = {f"{module}.{each}_proj": [size] for each, size in sizes.items()}
        if variant.fused_qkv is not None:
            qkv = {f"{module}.{variant.fused_qkv}": list(sizes.values())}
        orders, self._order = dict[str, Tensor](), None
        if variant.interleaved and table is not None:
            one = _halves_apart(1, self._head_dim, table.shape[1])
            self._order = one.argsort().to(parts.device)
            orders = {
                f"{module}.{each}_proj": _halves_apart(count, self._head_dim, table.shape[1])
                for each, count in (("q", heads), ("k", kv_heads))
            }
        if variant.gated:
            query = f"{module}.q_proj"
            qkv[query], orders[query] = [sizes["q"]] * 2, _gates_first(heads, self._head_dim)
        self._qkv = parts.cut(qkv, hidden, bias=qkv_bias, orders=orders)
        self._total = parts.shard.total
        self._output = parts.part_of_sum(f"{module}.{variant.output}", hidden, sizes["q"], bias=output_bias)
        if not variant.gated:
            multiplier = read(config, "residual_multiplier", 1.0) * read(config, "attention_out_multiplier", 1.0)
            parts.writers[Point.Z] = self._output, multiplier, None
        self._qk_norm = None
        if variant.qk_norm or read(config, "use_qk_norm", False):
            self._qk_norm = parts.bundle.hold(self._take_qk_norm(module, parts))
        wide = ("q", "k") if variant.wide_qk_norm else ()
        self._wide_norms = [parts.hold(f"{module}.{each}_norm.weight", sizes[each]) for each in wide]

    def _take_qk_norm(self, name: str, parts: Parts) -> Tensor:
        """`[heads + kv_heads, head_dim]`: the weight of every query and key head's norm."""
        norm = VARIANTS[parts.config.model_type].head_norm
        query = _take_norm(parts, f"{name}.q_{norm}", self._head_dim).expand(self._heads, -1)
        key = _take_norm(parts, f"{name}.k_{norm}", self._head_dim).expand(self._kv_heads, -1)
        return torch.cat((query, key))

    def __call__(self, normed: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        taps, rotated = batch.taps, self._heads + self._kv_heads
        qkv = self._qkv(normed).view(-1, self._gates + rotated + self._kv_heads, self._head_dim)
        gates, qk, value = torch.split(qkv, [self._gates, rotated, self._kv_heads], dim=1)
        if taps is not None:
            taps(Point.Q, qk[:, : self._heads], self._order)
            taps(Point.K, qk[:, self._heads :], self._order)
        if self._qk_norm is not None:
            qk = rms_norm(qk, self._qk_norm.tensor, self._eps)
        if not self._wide_norms:
            qk = self._rotate(qk, batch)
        query, key = torch.split(qk, [self._heads, self._kv_heads], dim=1)
        if self._wide_norms:
            query, key = (
                self._rotate(rms_norm(each.flatten(1), norm.tensor, self._eps).view(each.shape), batch)
                for each, norm in zip((query, key), self._wide_norms, strict=True)
            )
        spec = self._spec if self._sinks is None else replace(self._spec, sinks=self._sinks.tensor)
        if taps is not None:
            taps(Point.V, value)
            taps(Point.Q_ROT, query, self._order)
            taps(Point.K_ROT, key, self._order)
        attended = self._attention(query, key, value, kv, batch, spec)
        if taps is not None:
            taps.pattern(query, kv, batch, spec)
            taps(Point.Z, attended)
        attended = attended.view(-1, self._heads * self._head_dim)
        return self._total(self._output(attended if not self._gates else gate_(attended, gates.flatten(1))))

    def _rotate(self, heads: Tensor, batch: Batch) -> Tensor:
        return heads if self._table is None else rotate(heads, self._table, batch.positions)


class Norm:
    """Root-mean-square norm over the last axis, or layer norm."""

    def __init__(self, parts: Parts, name: str) -> None:
        width, variant = parts.config.hidden_size, VARIANTS[parts.config.model_type]
        self.weight, self.eps = parts.bundle.hold(_take_norm(parts, name, width)), _eps(parts.config)
        self._bias = parts.hold(f"{name}.bias", width) if variant.biased else None

    def __call__(self, x: Tensor) -> Tensor:
        if self._bias is not None:
            return layer_norm(x, self.weight.tensor, self._bias.tensor, self.eps)
        return rms_norm(x, self.weight.tensor, self.eps)

    def of_sum(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """`x`, to which `other` has been added, and its norm."""
        if self._bias is None:
            return add_rms_norm(x, other, self.weight.tensor, self.eps)
        return (total := add_(x, other)), self(total)


def decoder_layer(attention: Attention, tables: Tables, index: int, parts: Parts) -> Layer:
    """A layer: `h = x + mixed(norm(x))`, then `h + feed_forward(norm(h))`, each sum in the tensor that the last
    projection has made; or one of them alone, where such layers take turns. `tables` are the `rotary_tables`.
    """
    config, variant = parts.config, VARIANTS[parts.config.model_type]
    name, residual = f"{variant.layers}.{index}", read(config, "residual_multiplier", 1.0)
    norms = [None if each is None else Norm(parts, f"{name}.{each}") for each in variant.norms]
    before, after, before_mlp, after_mlp = norms
    halves = list[tuple[Norm | None, Layer, Norm | None, Point, Point]]()
    # `after(run(before(x)))`, with either norm or none; where what is normed goes in, and where the result comes out.
    mixes = _layer_type(config, index) not in _MIX_NOTHING
    if mixes:
        mixer = _mixer(attention, tables, index, parts, name)
        halves.append((before, mixer, after, Point.ATTN_IN, Point.ATTN_OUT))
    if not (variant.lone and mixes):
        first = before if variant.lone else before_mlp
        halves.append((first, _feed_forward(parts, name, index), after_mlp, Point.MLP_IN, Point.MLP_OUT))
    for point, norm in ((Point.Z, after), (Point.MLP_POST, after_mlp)):
        if norm is not None and point in parts.writers:
            parts.writers[point] = *parts.writers[point][:2], (norm.weight, norm.eps)

    def layer(hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        taps, added = batch.taps, None
        for before, run, after, enters, leaves in halves:
            if added is not None and taps is None and before is not None:
                hidden, normed = before.of_sum(added, hidden)
            else:
                if added is not None:
                    hidden = add_(added, hidden)
                    if taps is not None:
                        taps(Point.RESID_MID, hidden)
                normed = hidden if before is None else before(hidden)
            if taps is not None and before is not None:
                taps(enters, normed)
            made = run(normed, batch, kv)
            added = _times(made if after is None else after(made), residual)
            if taps is not None:
                taps(leaves, added)
        assert added is not None
        return add_(added, hidden)

    return layer


def _mixer(attention: Attention, tables: Tables, index: int, parts: Parts, name: str) -> Layer:
    """What mixes tokens in the layer `name`."""
    config, kind = parts.config, _folding(parts.config, index)
    folding = None if kind is None else kind(parts, name)
    if folding is not None and not attends(config, index):
        return folding
    attend: Layer
    if VARIANTS[config.model_type].latents:
        module, pairs = f"{name}.{VARIANTS[config.model_type].attention}", read(config, "rope_interleave", True)
        attend = LatentAttention(attention, tables[None], parts, module, interleaved=pairs)
    else:
        attend = SelfAttention(attention, tables, index, parts, name)
    if folding is None:
        return attend
    inward, outward = config.attention_in_multiplier, config.attention_out_multiplier

    def mix(normed: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        """As Falcon-H1 does, which folds and attends beside each other."""
        folded = _times(folding(normed, batch, kv), config.ssm_out_multiplier)
        attended = attend(normed if inward == 1 else normed * inward, batch, kv)
        return add_(_times(attended, outward), folded)

    return mix


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else scale_(x, factor)


def _feed_forward(parts: Parts, name: str, index: int) -> Layer:
    """That of the layer `name`."""
    config, variant, activation = parts.config, VARIANTS[parts.config.model_type], activation_name(parts.config)
    mixture = variant.experts(config, index)
    if mixture is not None:
        return experts(parts, name, mixture, activation)
    bias = variant.biased or read(config, "mlp_bias", False) or read(config, "use_bias", False)
    names, (opened, added) = (f"{name}.{variant.mlp}", variant.projections), read(config, "mlp_multipliers", (1.0, 1.0))
    made, down = mlp(parts, *names, variant.width(config), activation, bias=bias, scales=(opened, added))
    parts.writers[Point.MLP_POST] = down, added * read(config, "residual_multiplier", 1.0), None
    return made


def points_inside(config: Config, index: int) -> Mapping[Point, PointShape]:
    """Those inside a layer that it gives to `Batch.taps`. One that takes the residual stream as it is has no `attn_in`
    or `mlp_in` beside it.
    """
    variant, hidden = VARIANTS[config.model_type], PointShape(config.hidden_size)
    mixture, norms = variant.experts(config, index), variant.norms
    lacking = {point for point, norm in ((Point.ATTN_IN, norms[0]), (Point.MLP_IN, norms[2])) if norm is None}
    folding, inside = _folding(config, index), dict[Point, PointShape]()
    if variant.latents:
        inside |= LatentAttention.points(config)
    elif attends(config, index):
        inside |= attention_points(config.num_attention_heads, kv_heads_of(config), head_dim_of(config))
    if variant.positions is not None:  # nothing is rotated
        del inside[Point.Q_ROT], inside[Point.K_ROT]
    if folding is not None:
        inside[Point.STATE] = PointShape(folding.state_numbers(config))
    around: Sequence[Point] = (Point.ATTN_IN, Point.ATTN_OUT, Point.RESID_MID, Point.MLP_IN, Point.MLP_OUT)
    if variant.lone:
        around, lacking = around[:2] if inside else around[3:], set()
    inside |= dict.fromkeys(around, hidden)
    if Point.MLP_IN not in around:
        return inside
    if mixture is None:
        inside |= dict.fromkeys((Point.MLP_PRE, Point.MLP_POST), PointShape(variant.width(config)))
    else:
        inside |= dict.fromkeys((Point.ROUTER_LOGITS, Point.EXPERTS), PointShape(mixture.experts))
    return {point: shape for point, shape in inside.items() if point not in lacking}


def _spec(config: Config, index: int, head_dim: int) -> AttentionSpec:
    scale = read(config, "attention_multiplier", read(config, "query_pre_attn_scalar", head_dim) ** -0.5)
    scale = scale * read(config, "key_multiplier", 1.0) if read(config, "scale_attn_weights", True) else 1.0
    scale /= index + 1 if read(config, "scale_attn_by_inverse_layer_idx", False) else 1
    return AttentionSpec(scale, window_of(config, index), read(config, "attn_logit_softcapping"))


def _halves_apart(heads: int, head_dim: int, rotated: int) -> Tensor:
    """The order of a projection's outputs in which the numbers of a head that are rotated together, neighbours in the
    checkpoint, are half of what is rotated apart: scores do not depend on the order within queries and keys.
    """
    pairs = torch.arange(rotated).view(-1, 2).T.flatten()
    one = torch.cat((pairs, torch.arange(rotated, head_dim)))
    return (torch.arange(heads)[:, None] * head_dim + one).flatten()


def _gates_first(heads: int, head_dim: int) -> Tensor:
    """The order of a projection's outputs in which all gates come before all queries; in the checkpoint each head's
    query comes before its gate.
    """
    return torch.arange(2 * heads * head_dim).view(heads, 2, head_dim).transpose(0, 1).flip(0).flatten()


def _take_norm(parts: Parts, name: str, width: int) -> Tensor:
    """What the norm of that name multiplies by: in float32 where that is its weight and one, which no half type has."""
    weight = parts.source.take(f"{name}.weight", (width,))
    return weight.float() + 1 if VARIANTS[parts.config.model_type].one_more else weight


def _layer_type(config: Config, index: int) -> str | None:
    """As the config names it, if its family reads that."""
    kinds: Sequence[str] | None = read(config, "layer_types")
    return None if kinds is None else kinds[index]


def _eps(config: Config) -> float:
    """That of norms."""
    eps: float = getattr(config, VARIANTS[config.model_type].eps)
    return eps


def window_of(config: Config, index: int) -> int | None:
    """How many keys a query of the layer sees; None: all."""
    in_layer = _layer_type(config, index) == "sliding_attention"
    window: int | None = config.sliding_window if in_layer else read(config, "sliding_window")
    return window


def _folding(config: Config, index: int) -> type[Folding] | None:
    """What mixes tokens in the layer, unless it attends."""
    return VARIANTS[config.model_type].folding if _layer_type(config, index) in _FOLDING else None


def attends(config: Config, index: int) -> bool:
    """Whether the layer does."""
    kind = _layer_type(config, index)
    return kind not in _MIX_NOTHING and (kind == "hybrid" or _folding(config, index) is None)


def folded_bytes(config: Config, index: int, dtype: torch.dtype) -> int:
    """Bytes of the state that the layer folds tokens into; 0: it attends."""
    folding = _folding(config, index)
    return 0 if folding is None else folding.state_bytes(config, dtype)


def kv_shape(config: Config) -> tuple[int, int]:
    """Heads of keys and values that are kept of a token in each layer, and numbers of each."""
    if VARIANTS[config.model_type].latents:
        return 1, LatentAttention.kv_width(config)
    return kv_heads_of(config), head_dim_of(config)


def activation_name(config: Config) -> str:
    """The MLP's."""
    fields = "hidden_activation", "mlp_hidden_act", "activation_function"
    known = [each for each in fields if each in VARIANTS[config.model_type].reads]
    name: str = getattr(config, known[0]) if known else getattr(config, "hidden_act", "silu")
    return name


def divided(config: Config) -> Sequence[int]:
    """What the number of ranks must divide, at the least the KV heads; empty if layers cannot be cut."""
    variant = VARIANTS[config.model_type]
    if variant.wide_qk_norm or variant.folding is not None or variant.latents:
        return ()
    widths = set[int]()
    for index in range(config.num_hidden_layers):
        mixture = variant.experts(config, index)
        widths |= {variant.width(config)} if mixture is None else {mixture.width, mixture.shared_width}
    return config.num_attention_heads, kv_heads_of(config), *(widths - {0})


def embedding_scale(config: Config, dtype: torch.dtype) -> float:
    """What embeddings are multiplied by, as Transformers has it: in the type of the computation where it is a root."""
    if VARIANTS[config.model_type].root_of_hidden:
        return torch.tensor(config.hidden_size**0.5, dtype=dtype).item()
    scale: float = read(config, "embedding_multiplier", 1.0)
    return scale
