"""What a layer does with each token by itself, between norm and residual stream: a gated MLP, or experts.

Experts are such MLPs, of which each token visits a few, that a router chooses (Shazeer et al., arXiv:1701.06538).
Visits are put in the order of their experts, so that a product reads the weights of each expert that is visited, once;
and of no other. On a GPU nothing waits for the host to learn which these are, so CUDA graphs can be captured of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.domain.points import Point
from app.gpu.kernels.attention.base import Batch
from app.gpu.kernels.linear.base import Matrix, dense_of, split, stack, with_rows
from app.gpu.models.adapters import Dense
from app.gpu.models.elementwise import clamped_swiglu, gelu_, gelu_mul, scale_, silu_mul
from app.gpu.models.parts import Elementwise, Layer, Parts, activation_of

OWN_ACTIVATIONS: dict[str, Elementwise] = {"silu": silu_mul, "gelu_pytorch_tanh": gelu_mul, "gelu_new": gelu_mul}
"""Those with a kernel of ours that multiplies `up` by what becomes of `gate`, by the names of Transformers."""
Projections = tuple[str | None, str, str]
"""What the matrices of an MLP are called: gate, up and down. Gate and up may be one. Without a gate, None is there."""
PROJECTIONS: Projections = "gate_proj", "up_proj", "down_proj"
_STEP = 32
"""Outputs of a router are a multiple of this: whole panels of a CPU's products."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a layer, and what their parts are called in checkpoints."""

    experts: int
    top_k: int
    width: int
    """Of an expert's MLP."""
    module: str = "mlp"
    router: str = "gate"
    projections: Projections = PROJECTIONS
    merged: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    """Gate and up, and down, where those of all experts are one tensor."""
    renormalized: bool = True
    """Whether the weights of a token's visits sum to 1, before they are scaled."""
    sigmoid: bool = False
    """Whether a score is a logistic function of the router's output, not its share of the softmax."""
    correction: str | None = None
    """What is added to scores when experts are chosen, not when they are weighted (Wang et al., arXiv:2408.15664)."""
    groups: int = 1
    top_groups: int = 1
    """Experts are chosen from so many of the groups, those whose best two have the highest scores (DeepSeek-V3)."""
    scale: float = 1.0
    shared: str | None = None
    """An MLP of the layer that all tokens visit."""
    shared_projections: Projections = PROJECTIONS
    shared_width: int = 0
    shared_gate: str | None = None
    """What the shared MLP's weight is a logistic function of; without it, that is 1."""
    turned: bool = False
    """Whether tensors are as gpt-oss has them: all experts in one, `[experts, in, out]`, gate and up take turns, and
    router and projections have biases.
    """
    clamp: tuple[float, float] | None = None
    """Alpha and limit of `elementwise.clamped_swiglu`, where that is what multiplies gate and up."""


def acts_alike(activation: str, projections: Projections) -> bool:
    """Whether each neuron's bits depend on its own inputs alone on a CPU: `relu2` rounds once, whatever computes it."""
    own = ["gelu_new"] if projections[0] is None else OWN_ACTIVATIONS
    return activation in (*own, "relu2")


def neurons_of(activation: str, projections: Projections) -> Elementwise:
    """`activation(gate) * up` of `[..., 2 * width]`, the gate first; of `[..., width]` without a gate its activation
    alone.
    """
    if projections[0] is None:
        return gelu_ if activation == "gelu_new" else activation_of(activation)
    own = OWN_ACTIVATIONS.get(activation)
    if own is not None:
        return own
    function = activation_of(activation)

    def multiply(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return function(gate).mul_(up)

    return multiply


def mlp(
    parts: Parts,
    name: str,
    projections: Projections,
    width: int,
    activation: str,
    *,
    bias: bool = False,
    scales: tuple[float, float] = (1.0, 1.0),
) -> tuple[Layer, Dense]:
    """`down(activation(gate(x)) * up(x))`, gate and up in one projection, and `down` itself. `scales` are what gate and
    result are multiplied by.
    """
    up = _gate_up(parts, name, width, projections, bias=bias)
    down = parts.part_of_sum(f"{name}.{projections[2]}", parts.config.hidden_size, width, bias=bias)
    multiply, total = neurons_of(activation, projections), parts.shard.total
    count = 1 if projections[0] is None else 2

    def feed_forward(x: Tensor, batch: Batch, _kv: Tensor) -> Tensor:
        taps, gate_up = batch.taps, up(x)
        gate = gate_up[:, : gate_up.shape[1] // count]
        if scales[0] != 1:
            gate *= scales[0]
        if taps is not None:
            taps(Point.MLP_PRE, gate)
        neurons = multiply(gate_up)
        if taps is not None:
            taps(Point.MLP_POST, neurons)
        added = total(down(neurons))
        return added if scales[1] == 1 else scale_(added, scales[1])

    return feed_forward, down


def _gate_up(parts: Parts, name: str, width: int, projections: Projections, *, bias: bool = False) -> Dense:
    gate, up, _ = projections
    names = [f"{name}.{each}" for each in (gate, up) if each is not None]
    modules = {names[0]: [width, width]} if gate == up else {each: [width] for each in names}
    return parts.cut(modules, parts.config.hidden_size, bias=bias)


def experts(parts: Parts, name: str, mixture: Mixture, activation: str) -> Layer:
    """The feed-forward of a mixture of experts, in the layer `name`. Raises FieldOutOfRange for numbers of experts and
    groups that make no sense.
    """
    _require(mixture)
    neurons, clamp, total = neurons_of(activation, mixture.projections), mixture.clamp, parts.shard.total
    multiply = neurons if clamp is None else lambda gate_up: clamped_swiglu(gate_up, *clamp)
    on, module, hidden = _kernels_of(parts.device), f"{name}.{mixture.module}", parts.config.hidden_size
    router = parts.bundle.linear(*_take_router(parts, module, mixture))
    correction = None
    if mixture.correction is not None:
        correction = parts.hold(f"{module}.{mixture.correction}", mixture.experts)
    weights, biases = _take_experts(parts, module, mixture), _take_biases(parts, module, mixture)
    up, down = (parts.bundle.linear(*each, mixture.experts) for each in zip(weights, biases, strict=True))
    shared_up: Dense | None = None
    if mixture.shared is not None:
        shared, names, width = f"{name}.{mixture.shared}", mixture.shared_projections, mixture.shared_width
        shared_up = _gate_up(parts, shared, width, names)
        shared_down = parts.part_of_sum(f"{shared}.{names[2]}", hidden, width)

    def feed_forward(x: Tensor, batch: Batch, _kv: Tensor) -> Tensor:
        taps, logits = batch.taps, router(x)
        if taps is not None:
            taps(Point.ROUTER_LOGITS, logits[:, : mixture.experts])
        ids, shares = on.route(
            logits,
            mixture.top_k,
            experts=mixture.experts,
            correction=None if correction is None else correction.tensor,
            sigmoid=mixture.sigmoid,
            renormalized=mixture.renormalized,
            scale=mixture.scale,
            groups=mixture.groups,
            top_groups=mixture.top_groups,
        )
        if taps is not None:
            taps.experts(ids, shares, mixture.experts)
        places, starts = on.group(ids, mixture.experts)
        for linear in (up, down):
            linear.weights[0].expect(starts)
        visits = down(multiply(up(on.spread(x, places), starts)), starts)
        added = None if shared_up is None else shared_down(multiply(shared_up(x)))
        gate = None if mixture.shared_gate is None else logits[:, mixture.experts :]
        return total(on.combine(visits, places, shares, added, gate))

    return feed_forward


def _require(mixture: Mixture) -> None:
    in_groups, uneven = mixture.experts // mixture.groups * mixture.top_groups, mixture.experts % mixture.groups
    if not 1 <= mixture.top_k <= in_groups:
        raise FieldOutOfRange(
            f"num_experts_per_tok must be between 1 and {in_groups}, the experts that a token may visit; got "
            f"{mixture.top_k}",
            param="model",
        )
    if uneven or not 1 <= mixture.top_groups <= mixture.groups:
        raise FieldOutOfRange(
            f"n_group must divide the {mixture.experts} experts, and topk_group be between 1 and n_group; got "
            f"{mixture.groups} and {mixture.top_groups}",
            param="model",
        )


def _take_router(parts: Parts, module: str, mixture: Mixture) -> tuple[Matrix, Tensor | None]:
    """The router's rows, one for the gate of the shared expert behind them, and zeros: they are multiplied in one go,
    in the type of the computation. And its bias, if it has one.
    """
    router, hidden = f"{module}.{mixture.router}", parts.config.hidden_size
    rows = [parts.source.take(f"{router}.weight", (mixture.experts, hidden))]
    if mixture.shared_gate is not None:
        rows.append(parts.source.take(f"{module}.{mixture.shared_gate}.weight", (1, hidden)))
    bias, count = None, -(-sum(map(len, rows)) // _STEP) * _STEP
    if mixture.turned:
        bias = F.pad(parts.source.take(f"{router}.bias", (mixture.experts,)), (0, count - mixture.experts))
    return with_rows(stack(rows), count), bias


def _kernels_of(device: torch.device) -> Any:
    """What lies around experts' products there: a GPU needs nothing of Numba."""
    if device.type == "cpu":
        from app.gpu.kernels.cpu import experts as on_cpu

        return on_cpu
    from app.gpu.kernels import experts

    return experts


def _take_experts(parts: Parts, module: str, mixture: Mixture) -> tuple[Matrix, Matrix]:
    """Gate and up of all experts, `[experts * 2 * width, hidden]`, and down, `[experts * hidden, width]`: of each the
    shard's share. Checkpoints have them one by one, or all in one tensor; a GGUF file of a mixture that is `turned`,
    all experts' gates in one, and so on.
    """
    count, width, hidden = mixture.experts, mixture.width, parts.config.hidden_size
    gate, up, down = mixture.projections
    inputs = [each for each in (gate, up) if each is not None]
    take, holds = parts.source.take_matrix, parts.source.holds
    (both, back), experts = (f"{module}.{each}" for each in mixture.merged), f"{module}.experts"
    first, second = list[Matrix](), list[Matrix]()
    if mixture.turned and holds(f"{experts}.{up}"):
        kinds = [split(take(f"{experts}.{each}", (count, width, hidden)), width) for each in inputs]
        first = [each for of_one in zip(*kinds, strict=True) for each in of_one]
        second = split(take(f"{experts}.{down}", (count, hidden, width)), hidden)
    elif mixture.turned:
        gate_up = dense_of(take(both, (count, hidden, 2 * width))).view(count, hidden, width, 2)
        first = list(gate_up.permute(0, 3, 2, 1).reshape(-1, width, hidden))
        second = list(dense_of(take(back, (count, width, hidden))).view(count, width, hidden).mT.contiguous())
    elif holds(both):
        first = split(take(both, (count, len(inputs) * width, hidden)), width)
        second = split(take(back, (count, hidden, width)), hidden)
    else:
        for expert in range(count):
            first += [take(f"{experts}.{expert}.{each}.weight", (width, hidden)) for each in inputs]
            second.append(take(f"{experts}.{expert}.{down}.weight", (hidden, width)))
    return stack([parts.shard.rows(each) for each in first]), stack([parts.shard.columns(each) for each in second])


def _take_biases(parts: Parts, module: str, mixture: Mixture) -> tuple[Tensor | None, Tensor | None]:
    """The same of their biases, which only some have."""
    if not mixture.turned:
        return None, None
    count, width, shard = mixture.experts, mixture.width, parts.shard
    if parts.source.holds(f"{module}.experts.gate_proj_bias"):
        both = [parts.source.take(f"{module}.experts.{each}_proj_bias", (count, width)) for each in ("gate", "up")]
        gate_up = torch.stack(both, 2)
    else:
        gate_up = parts.source.take(f"{module}.experts.gate_up_proj_bias", (count, 2 * width)).view(count, width, 2)
    share = shard.values(gate_up.permute(1, 0, 2)).permute(1, 2, 0)
    return share.reshape(count, -1), shard.once(
        parts.source.take(f"{module}.experts.down_proj_bias", (count, parts.config.hidden_size))
    )
