"""What lies around the products of experts on a CPU: which of them each token visits, and the way there and back.

A visit is a token at one expert. The rows of visits lie by expert, those of one in the order of their tokens, so that a
product reads each expert's weights once. What a row is, and the order in which a token's visits are summed, depends on
that token alone.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.gpu.kernels.cpu.compile import inlined
from app.gpu.kernels.cpu.elementwise import exponential, logistic, rounded
from app.gpu.kernels.cpu.intrinsics import widen
from app.gpu.kernels.cpu.launch import draw, parallel
from app.gpu.kernels.experts import BEST, LEAST_TOTAL

_ONE, _LOWEST, _HIGHEST = np.float32(1), np.float32(-3e38), np.float32(3e38)
"""Kernels are compiled for numbers that are finite."""
_LEAST_TOTAL = np.float32(LEAST_TOTAL)


def route(
    logits: Tensor,
    top_k: int,
    *,
    experts: int,
    correction: Tensor | None = None,
    sigmoid: bool = False,
    renormalized: bool = False,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
) -> tuple[Tensor, Tensor]:
    """`experts.route`. Of equal scores the first expert's is chosen."""
    tokens = len(logits)
    ids, weights = (logits.new_empty(tokens, top_k, dtype=each) for each in (torch.int32, torch.float32))
    _route(
        tokens=tokens,
        experts=experts,
        top_k=top_k,
        groups=groups,
        top_groups=top_groups,
        scale=scale,
        logits=logits,
        ids=ids,
        weights=weights,
        scores=logits.new_empty(tokens, experts, dtype=torch.float32),
        choices=logits.new_empty(tokens, experts + groups, dtype=torch.float32),
        correction=correction,
        sigmoid=sigmoid,
        renormalized=renormalized,
    )
    return ids, weights


def group(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """`experts.group`, of int32."""
    starts, places = ids.new_empty(experts + 1), ids.new_empty(ids.shape)
    _group(
        tokens=len(ids),
        top_k=ids.shape[1],
        experts=experts,
        ids=ids,
        starts=starts,
        places=places,
        ends=ids.new_empty(experts),
    )
    return places, starts


def spread(x: Tensor, places: Tensor) -> Tensor:
    """`experts.spread`."""
    tokens, top_k = places.shape
    out = x.new_empty(tokens, top_k, x.shape[1])
    _spread(tokens=tokens, top_k=top_k, width=x.shape[1], x=x, places=places, out=out)
    return out


def combine(
    visits: Tensor, places: Tensor, weights: Tensor, shared: Tensor | None = None, gate: Tensor | None = None
) -> Tensor:
    """`experts.combine`. A token's visits are summed in the order in which they were chosen."""
    tokens, top_k = places.shape
    out = visits.new_empty(tokens, visits.shape[2], dtype=torch.float32)
    _combine(
        tokens=tokens,
        top_k=top_k,
        width=visits.shape[2],
        visits=visits,
        places=places,
        weights=weights,
        out=out,
        shared=shared,
        gate=gate,
    )
    return out if visits.dtype is torch.float32 else rounded(out, visits.dtype)


def add_to_groups_(y: Tensor, bias: Tensor, starts: Tensor) -> Tensor:
    """Add to the rows of each expert in `y` `[tokens, top_k, width]` float32 its `bias`, of `[experts, width]`."""
    _add_to_groups(experts=len(bias), width=bias.shape[1], y=y, bias=bias, starts=starts)
    return y


@parallel
def _route(
    a: Any,
    tokens: int,
    experts: int,
    top_k: int,
    groups: int,
    top_groups: int,
    scale: float,
    logits: Tensor,
    ids: Tensor,
    weights: Tensor,
    scores: Tensor,
    choices: Tensor,
    correction: Tensor | None = None,
    *,
    sigmoid: bool,
    renormalized: bool,
) -> None:
    """Draw tokens until none is left."""
    while True:
        token = draw(a)
        if token >= tokens:
            return
        own: Any = logits[token * a.logits_stride :]
        score: Any = scores[token * experts :]
        choice: Any = choices[token * (experts + groups) :]
        if sigmoid:
            for i in range(experts):
                score[i] = logistic(_ONE, widen(own[i]))
        else:
            peak, total = widen(own[0]), np.float32(0)
            for i in range(experts):
                peak = max(peak, widen(own[i]))
            for i in range(experts):
                score[i] = exponential(widen(own[i]) - peak)
                total += score[i]
            for i in range(experts):
                score[i] /= total
        for i in range(experts):
            choice[i] = score[i] if correction is None else score[i] + widen(correction[i])
        if groups > 1:
            _close_groups(choice, experts, groups, top_groups)
        chosen: Any = ids[token * top_k :]
        weight: Any = weights[token * top_k :]
        total = np.float32(0)
        for k in range(top_k):
            best = _best(choice, 0, experts)
            chosen[k], weight[k] = best, score[best]
            choice[best] = _LOWEST
            total += weight[k]
        factor = scale / (total + _LEAST_TOTAL) if renormalized else scale
        for k in range(top_k):
            weight[k] *= factor


@inlined
def _best(numbers: Any, first: Any, end: Any) -> Any:
    """Where the largest is, the first of several."""
    best = first
    for i in range(first + 1, end):
        if numbers[i] > numbers[best]:
            best = i
    return best


@inlined
def _close_groups(choice: Any, experts: Any, groups: Any, top_groups: Any) -> None:
    """Leave the experts of the best groups; behind `experts` numbers there is room for one for each group."""
    size = experts // groups
    for g in range(groups):
        total, first, second = np.float32(0), _LOWEST, _LOWEST
        for i in range(g * size, (g + 1) * size):
            if choice[i] > first:
                first, second = choice[i], first
            elif choice[i] > second:
                second = choice[i]
        total = first + second if size >= BEST else first
        choice[experts + g] = total
    for _ in range(top_groups):
        best = experts
        for g in range(experts, experts + groups):
            if choice[best] == _HIGHEST or (choice[g] > choice[best] and choice[g] != _HIGHEST):
                best = g
        choice[best] = _HIGHEST
    for g in range(groups):
        if choice[experts + g] != _HIGHEST:
            for i in range(g * size, (g + 1) * size):
                choice[i] = _LOWEST


@parallel
def _group(
    a: Any, tokens: int, top_k: int, experts: int, ids: Tensor, starts: Tensor, places: Tensor, ends: Tensor
) -> None:
    """One thread sorts: visits are few beside what they multiply."""
    if draw(a) > 0:
        return
    for i in range(experts):
        ends[i] = 0
    for visit in range(tokens * top_k):
        ends[ids[visit]] += 1
    total: Any = 0
    for i in range(experts):
        starts[i] = total
        total += ends[i]
        ends[i] = starts[i]
    starts[experts] = total
    for visit in range(tokens * top_k):
        places[visit] = ends[ids[visit]]
        ends[ids[visit]] += 1


@parallel
def _spread(a: Any, tokens: int, top_k: int, width: int, x: Tensor, places: Tensor, out: Tensor) -> None:
    """Draw tokens until none is left."""
    while True:
        token = draw(a)
        if token >= tokens:
            return
        own = x[token * a.x_stride :]
        for k in range(top_k):
            target = out[places[token * top_k + k] * width :]
            for i in range(width):
                target[i] = own[i]


@parallel
def _combine(
    a: Any,
    tokens: int,
    top_k: int,
    width: int,
    visits: Tensor,
    places: Tensor,
    weights: Tensor,
    out: Tensor,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
) -> None:
    """Draw tokens until none is left. Sums are float32, the visits in the order of the token's choice."""
    while True:
        token = draw(a)
        if token >= tokens:
            return
        total: Any = out[token * width :]
        for i in range(width):
            total[i] = np.float32(0)
        for k in range(top_k):
            own: Any = visits[places[token * top_k + k] * width :]
            weight: Any = weights[token * top_k + k]
            for i in range(width):
                total[i] += weight * widen(own[i])
        if shared is not None:
            more, weight = shared[token * a.shared_stride :], _ONE
            if gate is not None:
                weight = logistic(_ONE, widen(gate[token * a.gate_stride]))
            for i in range(width):
                total[i] += weight * widen(more[i])


@parallel
def _add_to_groups(a: Any, experts: int, width: int, y: Tensor, bias: Tensor, starts: Tensor) -> None:
    """Draw experts until none is left."""
    while True:
        expert = draw(a)
        if expert >= experts:
            return
        own = bias[expert * width :]
        for row in range(starts[expert], starts[expert + 1]):
            target = y[row * width :]
            for i in range(width):
                target[i] += widen(own[i])
