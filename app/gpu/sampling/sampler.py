"""From logits to tokens, where the logits are: nothing here waits for the device.

Order of the steps, as the OpenAI and vLLM servers have it: log-probabilities are reported of the raw logits; then
bias, the minimum length, and penalties change them; then temperature, `top_k`, `top_p` and `min_p`, each on what the
one before left, as Transformers chains its warpers; then one draw.

The draw is a counter-based random number, Philox keyed by the request's seed at the position of the new token
(Salmon et al., 2011): there is no generator state to keep, so a session that is rewound, forked, preempted or moved
draws the same. No row's token depends on the rows beside it, but for rounding: on CUDA the order of a sum in a softmax
changes with the number of rows, and a token at the very edge of `top_p`, or of what was drawn, may fall on either side.
"""

import torch
from torch import Tensor

from app.gpu.sampling.inputs import Draws, SamplingInputs, Truncation

CANDIDATES = 1024
"""Tokens that a CPU sorts first; nearly always enough to reach `top_p`, and 40 times cheaper than sorting a vocabulary.
A GPU would have to be waited for to see whether they were enough; `triton_draw.py` sorts nothing."""


def choose(logits: Tensor, inputs: SamplingInputs, *, on_host: bool) -> Tensor:
    """One token per row, `[rows]` int64. `logits` is float32 `[rows, vocab_size]`, dense; it is changed in place.

    `on_host`: the device is the CPU.
    """
    _adjust(logits.view(-1), inputs)
    chosen = _argmax(logits, on_host)
    if inputs.free is not None:
        chosen.index_copy_(0, inputs.free.rows, _draw_any(logits, inputs.free, on_host))
    if inputs.truncated is not None:
        draws, limits = inputs.truncated
        chosen.index_copy_(0, draws.rows, _draw_some(logits, draws, limits, on_host))
    return chosen


def _argmax(logits: Tensor, on_host: bool) -> Tensor:
    """Largest logit of each row. On a CPU through NumPy, which takes a tenth of PyTorch's time for it."""
    return torch.from_numpy(logits.numpy().argmax(axis=-1)) if on_host else logits.argmax(dim=-1)


def _adjust(logits: Tensor, inputs: SamplingInputs) -> None:
    """Apply bias, minimum length and penalties to the flattened logits, in place."""
    if inputs.bias is not None:
        logits.index_add_(0, inputs.bias.tokens, inputs.bias.values)
    if inputs.forbidden is not None:
        logits.index_copy_(0, inputs.forbidden.tokens, inputs.forbidden.values)
    if inputs.repetition is not None:
        tokens, penalty = inputs.repetition.tokens, inputs.repetition.values
        value = logits[tokens]
        logits.index_copy_(0, tokens, torch.where(value > 0, value / penalty, value * penalty))
    if inputs.counts is not None:
        logits.index_add_(0, inputs.counts.tokens, inputs.counts.values, alpha=-1)


def _draw_any(logits: Tensor, draws: Draws, on_host: bool) -> Tensor:
    """Draw from the whole vocabulary, `[draws]` int64."""
    probabilities = _probabilities(logits, draws)
    if not on_host:
        from app.gpu.sampling.triton_draw import draw_any  # imports Triton, which only a GPU needs

        return draw_any(probabilities, draws)
    return _invert(probabilities, draws.uniforms).clamp(max=logits.shape[1] - 1)[:, 0]


def _draw_some(logits: Tensor, draws: Draws, limits: Truncation, on_host: bool) -> Tensor:
    """Draw from the tokens that the requests' limits leave, `[draws]` int64."""
    probabilities = _probabilities(logits, draws)
    vocab_size = probabilities.shape[1]
    if not on_host:
        from app.gpu.sampling.triton_draw import draw

        return draw(probabilities, draws, limits)
    if vocab_size <= CANDIDATES:
        return _draw_sorted(*probabilities.sort(descending=True), draws.uniforms, limits, vocab_size)
    values, ids = probabilities.topk(CANDIDATES)
    chosen = _draw_sorted(values, ids, draws.uniforms, limits, vocab_size)
    short = (~_suffices(values, limits, vocab_size)).nonzero()[:, 0]
    if len(short):
        values, ids = probabilities[short].sort(descending=True)
        chosen[short] = _draw_sorted(values, ids, draws.uniforms[short], limits.of(short), vocab_size)
    return chosen


def _draw_sorted(values: Tensor, ids: Tensor, uniforms: Tensor, limits: Truncation, vocab_size: int) -> Tensor:
    """Draw from candidates `[draws, candidates]`, most probable first, with `uniforms` `[draws, 1]`."""
    ranks = torch.arange(values.shape[1], device=values.device)
    within = ranks < limits.top_k
    values = torch.where(within, values, 0.0)
    # A running sum, as it goes through each row by itself: a plain one of a single row is split over threads.
    total = values.double().cumsum(-1)[:, -1:].to(values.dtype)
    values = values / torch.where(limits.top_k < vocab_size, total, 1.0)
    mass_before = values.cumsum(dim=-1) - values
    keep = within & (mass_before < limits.top_p) & (values >= limits.min_p * values[:, :1])
    keep[:, 0] = True
    index = _invert(torch.where(keep, values, 0.0), uniforms)
    return ids.gather(1, torch.minimum(index, keep.sum(-1, keepdim=True) - 1))[:, 0]


def _probabilities(logits: Tensor, draws: Draws) -> Tensor:
    return torch.softmax(logits[draws.rows] / draws.temperatures, dim=-1)


def _invert(values: Tensor, uniforms: Tensor) -> Tensor:
    """Where the running sums of `values` `[draws, candidates]` pass that share of their total: `[draws, 1]` int64."""
    cumulative = values.double().cumsum(dim=-1)
    return torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)


def _suffices(values: Tensor, limits: Truncation, vocab_size: int) -> Tensor:
    """Whether no token past the sorted ones could pass the limits, `[draws]` bool."""
    reached_top_p = (limits.top_p < 1) & (values.sum(-1, keepdim=True) >= limits.top_p)
    below_min_p = values[:, -1:] < limits.min_p * values[:, :1]
    unlimited = limits.top_k >= vocab_size
    return ((unlimited & (reached_top_p | below_min_p)) | (limits.top_k <= values.shape[1]))[:, 0]
