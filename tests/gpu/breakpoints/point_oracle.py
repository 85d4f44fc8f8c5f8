"""Transformers' modules with hooks at the points of a layer: what stands there, and what follows if it is changed.

Hooks change tensors in place: so the residual stream that a norm takes is changed where it is added, too.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from app.domain.points import Point
from tests.gpu.breakpoints.breaking_oracle import decoder_layers

See = Callable[[Tensor], None]
"""Of `[tokens, ...]`, of which it may change any."""
_seeing = dict[Point, See]()
_LAYER = list[int]()


def _observed(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> Any:
    """The module's own attention, between the points around it: `[1, heads, tokens, head_dim]` each."""
    attend = sys.modules[type(module).__module__].eager_attention_forward
    seeing = _seeing if [getattr(module, "layer_idx", None)] == _LAYER else dict[Point, See]()
    scale = getattr(module, "key_multiplier", 1.0)  # of Falcon-H1's keys: the cache has them without
    key = key / scale
    for point, states in ((Point.V, value), (Point.Q_ROT, query), (Point.K_ROT, key)):
        if point in seeing:
            seeing[point](states[0].transpose(0, 1))
    mixed, weights = attend(module, query, key * scale, value, mask, **given)
    if Point.PATTERN in seeing:
        seeing[Point.PATTERN](weights[0].transpose(0, 1))
    if Point.Z in seeing:
        seeing[Point.Z](mixed[0])
    return mixed, weights


AttentionInterface.register("observed", _observed)
AttentionMaskInterface.register("observed", eager_mask)
_ATTENTION = "self_attn", "attn", "attention", "self_attention", "linear_attn", "mamba", "conv", "mixer"
_MLP = "mlp", "block_sparse_moe", "feed_forward", "mixer"
_ROUTERS = "gate", "router"
_FINAL = "norm", "ln_f", "final_layer_norm", "final_layernorm", "embedding_norm", "norm_f"
_NORMS = {
    "gemma": ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    "glm4": ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    "olmo2": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "gpt2": ("ln_1", None, "ln_2", None),
    "gptj": ("ln_1", None, None, None),
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "bamba": ("input_layernorm", None, "pre_ff_layernorm", None),
    "lfm2": ("operator_norm", None, "ffn_norm", None),
    "mamba2": ("norm", None, "norm", None),
}
_LIKE = {"gemma2": "gemma", "gemma3_text": "gemma", "olmo3": "olmo2", "falcon_h1": "bamba", "lfm2_moe": "lfm2"}
_LIKE |= {"nemotron_h": "mamba2", "gemma": "before"}


def _child(module: nn.Module, *names: str) -> Any:
    return next((found for name in names if (found := getattr(module, name, None)) is not None), None)


def _seen_linear(module: Any, see: See) -> list[Any]:
    """Hooks that show the product inside a module, before the module looks at it."""
    linear = F.linear

    def product(*args: Any) -> Tensor:
        found: Tensor = linear(*args)
        see(found)
        return found

    def enter(_module: Any, _args: Any) -> None:
        F.linear = product  # type: ignore[assignment]

    def leave(_module: Any, _args: Any, _given: Any) -> None:
        F.linear = linear

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]


@contextmanager
def seen(model: Any, index: int, seeing: Mapping[Point, See]) -> Iterator[None]:
    """Run `seeing` at points of a layer, or of the model, whenever it computes one."""
    layer, decoder, config = decoder_layers(model)[index], model.get_decoder(), model.config
    attention, mlp = _child(layer, *_ATTENTION), _child(layer, *_MLP)
    norms = _NORMS.get(_LIKE.get(config.model_type, config.model_type), _NORMS["before"])
    before, after, before_mlp, after_mlp = (None if name is None else getattr(layer, name) for name in norms)
    router = _child(mlp, *_ROUTERS)
    up = _child(mlp, "gate_proj", "gate_up_proj", "c_fc", "up_proj", "fc_in", "dense_h_to_4h", "w1")
    down = _child(mlp, "down_proj", "c_proj", "fc_out", "dense_4h_to_h", "w2")
    fused = _child(attention, "qkv_proj", "c_attn")
    scale = getattr(config, "residual_multiplier", 1.0)
    handles = list[Any]()

    def tensor(given: Any) -> Tensor:
        found: Tensor = given[0] if isinstance(given, tuple) else getattr(given, "logits", given)
        return found if found.dim() == 2 else found[0]

    def out(point: Point, module: Any, part: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        handles.append(module.register_forward_hook(lambda m, args, given: seeing[point](part(tensor(given)))))

    def into(point: Point, module: Any) -> None:
        def hook(_module: Any, args: Any, kwargs: Any) -> None:
            seeing[point](tensor(args or kwargs["hidden_states"]))

        handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def added(point: Point, *modules: Any, scales: Sequence[Any] = (scale,) * 2) -> None:
        """Some families multiply what they add, or add what two modules give: the last of them takes what changes."""
        before = list[Tensor]()

        def hook(module: Any, _args: Any, given: Any) -> None:
            scaled = tensor(given) * scales[modules.index(module)]
            before.append(scaled)
            if module is modules[-1]:
                whole = torch.stack(before).sum(0)
                seeing[point](whole)
                tensor(given).copy_((whole - sum(before[:-1])) / scales[len(modules) - 1])
                before.clear()

        handles.extend(module.register_forward_hook(hook) for module in modules)

    heads = getattr(config, "num_attention_heads", 1)
    kv_heads = getattr(config, "num_key_value_heads", heads)
    width = getattr(config, "qk_head_dim", getattr(config, "head_dim", None)) or config.hidden_size // heads
    sizes = [heads * width, kv_heads * width, kv_heads * width]
    for point in seeing:
        match point:
            case Point.EMBED | Point.RESID_PRE:
                into(point, layer)
            case Point.RESID_POST:
                out(point, layer)
            case Point.ATTN_IN:
                out(point, before)
            case Point.Q | Point.K if fused is not None:
                number = (Point.Q, Point.K).index(point)
                out(point, fused, lambda x, n=number: x.split(sizes, dim=-1)[n])  # type: ignore[misc]
            case Point.Q | Point.K:
                projection = _child(attention, f"{point}_proj", f"{point}_b_proj")
                per_head = projection.out_features // (heads if point is Point.Q else kv_heads)  # a gate may follow
                out(point, projection, lambda x, n=per_head: x.unflatten(1, (-1, n))[..., :width])  # type: ignore[misc]
            case Point.V if not hasattr(sys.modules[type(attention).__module__], "eager_attention_forward"):
                out(point, attention.v_proj)
            case Point.ATTN_OUT if attention is not getattr(layer, "mamba", attention) is not None:
                both = layer.mamba, attention
                added(point, *both, scales=(layer.ssm_out_multiplier, layer.attn_out_multiplier))
            case Point.ATTN_OUT:
                added(point, after or attention)
            case Point.RESID_MID:
                into(point, before_mlp or mlp)
            case Point.MLP_IN:
                out(point, before_mlp)
            case Point.MLP_PRE if hasattr(mlp, "gate_up_proj"):
                out(point, up, lambda x: x.chunk(2, dim=-1)[0])
            case Point.MLP_PRE:
                added(point, up, scales=(getattr(mlp, "gate_multiplier", 1.0),))
            case Point.MLP_POST:
                into(point, down)
            case Point.MLP_OUT:
                added(point, after_mlp or mlp, *filter(None, [getattr(layer, "shared_mlp", None)]))
            case Point.ROUTER_LOGITS:
                handles += _seen_linear(router, seeing[point])
            case Point.EXPERTS:

                def dense(_module: Any, _args: Any, given: Any) -> None:
                    logits, weights, ids = given
                    whole = torch.zeros_like(logits).scatter_(1, ids, weights)
                    seeing[Point.EXPERTS](whole)
                    weights.copy_(whole.gather(1, ids))

                handles.append(router.register_forward_hook(dense))
            case Point.FINAL_NORM:
                out(point, _child(decoder, *_FINAL))
            case Point.LOGITS:
                out(point, model)
    model.set_attn_implementation("observed")
    _seeing.update(seeing)
    _LAYER[:] = [index]
    try:
        yield
    finally:
        _seeing.clear()
        for handle in handles:
            handle.remove()
        model.set_attn_implementation("eager")
