"""From logits to tokens and their log-probabilities, where the logits are: nothing here waits for the device.

Order of the steps, as the OpenAI and vLLM servers have it: log-probabilities are reported of the raw logits; then
bias, the minimum length, and penalties change them; then temperature, `top_k`, `top_p` and `min_p`, each on what the
one before left, as Transformers chains its warpers; then one draw.

The draw is a counter-based random number, Philox keyed by the request's seed at the position of the new token
(Salmon et al., 2011): there is no generator state to keep, so a session that is rewound, forked, preempted or moved
draws the same. No row's token depends on the rows beside it, but for rounding: on CUDA the order of a sum in a softmax
changes with the number of rows, and a token at the very edge of `top_p`, or of what was drawn, may fall on either side.
"""

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from app.domain.values import TokenLogprobs
from app.gpu.device.streams import Download, Put
from app.gpu.sampling.requests import SampleRequest, draws, penalise

CANDIDATES = 1024
"""Tokens that a CPU sorts first; nearly always enough to reach `top_p`, and 40 times cheaper than sorting a vocabulary.
A GPU would have to be waited for to see whether they were enough; `triton_draw.py` sorts nothing."""
_ALIGNED = 4
"""Float32 numbers in 16 bytes."""

Changes = tuple[Tensor, Tensor]
"""One kind of change to logits: `[changes]` int64 tokens, each of them once, and `[changes]` float32 values. A token is
addressed as `row * vocab_size + token`, into the flattened logits of the rows that sample.
"""
Limits = tuple[Tensor, Tensor, Tensor]
"""What draws are limited to, all `[draws, 1]`: `top_k` int64, the vocabulary's size where there is no limit, then
`top_p` and `min_p`, float32.
"""


@dataclass(frozen=True, slots=True)
class Draws:
    """Rows that draw their token: `[draws]` int64 rows, `[draws, 1]` float64 from 0 to 1, `[draws, 1]` float32."""

    rows: Tensor
    uniforms: Tensor
    temperatures: Tensor


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """The requests of a step, on the device. A field that no row asks for is None."""

    bias: Changes | None
    forbidden: Changes | None
    repetition: Changes | None
    counts: Changes | None
    free: Draws | None
    """Draws from the whole vocabulary."""
    truncated: tuple[Draws, Limits] | None
    """Draws from what `top_k`, `top_p` and `min_p` leave."""


def place_requests(requests: Sequence[SampleRequest], vocab_size: int, put: Put) -> SamplingInputs:
    """Lay out the requests of the rows of logits, in their order, as arrays that `put` takes to the device with the
    step's other inputs. A row that asks for nothing costs next to nothing.
    """
    found = defaultdict[str, list[tuple[NDArray[np.int64], NDArray[np.float32]]]](list)
    free, truncated = list[int](), list[int]()
    for row, request in enumerate(requests):
        for kind, tokens, values in _changes(request):
            addressed = row * vocab_size + np.asarray(tokens, np.int64)
            found[kind].append((addressed, np.broadcast_to(np.asarray(values, np.float32), addressed.shape)))
        params = request.params
        if draws(params):
            (truncated if params.top_k > 0 or params.top_p < 1 or params.min_p > 0 else free).append(row)

    def changes(kind: str) -> Changes | None:
        if kind not in found:
            return None
        tokens, values = zip(*found[kind], strict=True)
        return put(np.concatenate(tokens)), put(np.concatenate(values))

    return SamplingInputs(
        changes("bias"),
        changes("forbidden"),
        changes("repetition"),
        changes("counts"),
        _place_draws(requests, free, put) if free else None,
        (_place_draws(requests, truncated, put), _place_limits(requests, truncated, vocab_size, put))
        if truncated
        else None,
    )


def _changes(request: SampleRequest) -> Iterator[tuple[str, ArrayLike, ArrayLike]]:
    """Each kind of change that the request asks for: its tokens, and a value for each of them, or one for all."""
    params, seen = request.params, request.seen
    if params.logit_bias:
        yield "bias", list(params.logit_bias), list(params.logit_bias.values())
    if request.forbidden:
        yield "forbidden", list(request.forbidden), -np.inf
    if not penalise(params):
        return
    assert seen is not None
    if params.repetition_penalty != 1 and seen.tokens:
        yield "repetition", seen.tokens, params.repetition_penalty
    times = np.array(seen.generated, np.float64)
    is_generated = times > 0
    if (params.presence_penalty or params.frequency_penalty) and is_generated.any():
        taken_off = params.presence_penalty + params.frequency_penalty * times[is_generated]
        yield "counts", np.array(seen.tokens, np.int64)[is_generated], taken_off


def _place_draws(requests: Sequence[SampleRequest], rows: list[int], put: Put) -> Draws:
    chosen = [requests[row] for row in rows]
    numbers = uniforms([each.params.seed for each in chosen], [each.position for each in chosen])
    temperatures = np.array([each.params.temperature for each in chosen], np.float32)
    return Draws(put(np.array(rows, np.int64)), put(numbers[:, None]), put(temperatures[:, None]))


def _place_limits(requests: Sequence[SampleRequest], rows: list[int], vocab_size: int, put: Put) -> Limits:
    params = [requests[row].params for row in rows]
    top_k = np.array([min(each.top_k or vocab_size, vocab_size) for each in params], np.int64)
    top_p = np.array([each.top_p for each in params], np.float32)
    min_p = np.array([each.min_p for each in params], np.float32)
    return put(top_k[:, None]), put(top_p[:, None]), put(min_p[:, None])


# Random numbers from keys and counters, with no state between them: Philox4x64-10 (Salmon et al., "Parallel Random
# Numbers: As Easy as 1, 2, 3", SC 2011), as NumPy's `Philox` computes it. All numbers of a step are computed at once,
# each in 128 bits of Python's long integers: 64 bits times 64 bits fit there. To make a generator of NumPy's for one
# number takes longer than a hundred of them.
_LANE_BYTES, _WORD_BITS, _ROUNDS = 16, 64, 10
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_INCREMENTS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_SPARE_BITS, _DOUBLE = np.uint64(11), 2.0**-53


def uniforms(keys: Sequence[int], counters: Sequence[int]) -> NDArray[np.float64]:
    """For each key and counter what `numpy.random.Generator(numpy.random.Philox(key=key, counter=counter)).random()`
    returns, from 0 to below 1: `[keys]`.

    Keys are less than 2^128, counters less than 2^64 - 1.
    """
    ones, words = _constants(len(keys))
    packed = _pack(keys)
    first, second = packed & words, packed >> _WORD_BITS & words
    steps = ones * _INCREMENTS[0], ones * _INCREMENTS[1]
    a, b, c, d = _pack(counters) + ones, 0, 0, 0
    for _ in range(_ROUNDS):
        left, right = _MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c
        a, b = (right >> _WORD_BITS ^ b ^ first) & words, right & words
        c, d = (left >> _WORD_BITS ^ d ^ second) & words, left & words
        first, second = first + steps[0], second + steps[1]  # what passes its word is never read: a lane has room
    lanes = np.frombuffer(a.to_bytes(_LANE_BYTES * len(keys), "little"), np.uint64)
    return (lanes[::2] >> _SPARE_BITS).astype(np.float64) * _DOUBLE


@functools.lru_cache(maxsize=256)
def _constants(lanes: int) -> tuple[int, int]:
    """A 1 in each lane, and a word of ones."""
    ones = _pack([1] * lanes)
    return ones, ones * ((1 << _WORD_BITS) - 1)


def _pack(numbers: Sequence[int]) -> int:
    """The numbers side by side, the first of them lowest."""
    return int.from_bytes(b"".join([number.to_bytes(_LANE_BYTES, "little") for number in numbers]), "little")


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
        logits.index_add_(0, *inputs.bias)
    if inputs.forbidden is not None:
        logits.index_copy_(0, *inputs.forbidden)
    if inputs.repetition is not None:
        tokens, penalty = inputs.repetition
        value = logits[tokens]
        logits.index_copy_(0, tokens, torch.where(value > 0, value / penalty, value * penalty))
    if inputs.counts is not None:
        logits.index_add_(0, *inputs.counts, alpha=-1)


def _draw_any(logits: Tensor, draws: Draws, on_host: bool) -> Tensor:
    """Draw from the whole vocabulary, `[draws]` int64."""
    probabilities = _probabilities(logits, draws)
    if not on_host:
        from app.gpu.sampling.triton_draw import draw_any  # imports Triton, which only a GPU needs

        return draw_any(probabilities, draws.uniforms)
    return _invert(probabilities, draws.uniforms).clamp(max=logits.shape[1] - 1)[:, 0]


def _draw_some(logits: Tensor, draws: Draws, limits: Limits, on_host: bool) -> Tensor:
    """Draw from the tokens that the requests' limits leave, `[draws]` int64."""
    probabilities = _probabilities(logits, draws)
    vocab_size = probabilities.shape[1]
    if not on_host:
        from app.gpu.sampling.triton_draw import draw

        return draw(probabilities, draws.uniforms, *limits)
    if vocab_size <= CANDIDATES:
        return _draw_sorted(*probabilities.sort(descending=True), draws.uniforms, limits, vocab_size)
    values, ids = probabilities.topk(CANDIDATES)
    chosen = _draw_sorted(values, ids, draws.uniforms, limits, vocab_size)
    short = (~_suffices(values, limits, vocab_size)).nonzero()[:, 0]
    if len(short):
        top_k, top_p, min_p = (limit[short] for limit in limits)
        values, ids = probabilities[short].sort(descending=True)
        chosen[short] = _draw_sorted(values, ids, draws.uniforms[short], (top_k, top_p, min_p), vocab_size)
    return chosen


def _draw_sorted(values: Tensor, ids: Tensor, uniforms: Tensor, limits: Limits, vocab_size: int) -> Tensor:
    """Draw from candidates `[draws, candidates]`, most probable first, with `uniforms` `[draws, 1]`."""
    top_k, top_p, min_p = limits
    ranks = torch.arange(values.shape[1], device=values.device)
    within = ranks < top_k
    values = torch.where(within, values, 0.0)
    # A running sum, as it goes through each row by itself: a plain one of a single row is split over threads.
    total = values.double().cumsum(-1)[:, -1:].to(values.dtype)
    values = values / torch.where(top_k < vocab_size, total, 1.0)
    mass_before = values.cumsum(dim=-1) - values
    keep = within & (mass_before < top_p) & (values >= min_p * values[:, :1])
    keep[:, 0] = True
    index = _invert(torch.where(keep, values, 0.0), uniforms)
    return ids.gather(1, torch.minimum(index, keep.sum(-1, keepdim=True) - 1))[:, 0]


def _probabilities(logits: Tensor, draws: Draws) -> Tensor:
    return torch.softmax(logits[draws.rows] / draws.temperatures, dim=-1)


def _invert(values: Tensor, uniforms: Tensor) -> Tensor:
    """Where the running sums of `values` `[draws, candidates]` pass that share of their total: `[draws, 1]` int64."""
    cumulative = values.double().cumsum(dim=-1)
    return torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)


def _suffices(values: Tensor, limits: Limits, vocab_size: int) -> Tensor:
    """Whether no token past the sorted ones could pass the limits, `[draws]` bool."""
    top_k, top_p, min_p = limits
    reached_top_p = (top_p < 1) & (values.sum(-1, keepdim=True) >= top_p)
    below_min_p = values[:, -1:] < min_p * values[:, :1]
    return (((top_k >= vocab_size) & (reached_top_p | below_min_p)) | (top_k <= values.shape[1]))[:, 0]


def log_probabilities(logits: Tensor) -> Tensor:
    """Natural logarithms of the softmax, `[rows, vocab_size]`, in a tensor of their own.

    PyTorch's kernel on CUDA sums a row in an order that depends on how far the row begins from a multiple of 16 bytes.
    It takes dense rows only, so each is filled up with logits that add nothing.
    """
    vocab_size = logits.shape[1]
    if logits.is_cuda and vocab_size % _ALIGNED:
        logits = F.pad(logits, (0, -vocab_size % _ALIGNED), value=-torch.inf)
    return torch.log_softmax(logits, dim=-1)[:, :vocab_size]


class Report:
    """The log-probabilities of one token in each row of `raw` `[rows, vocab_size]`, and the best `tops[i]` of row i.

    `token_ids` is `[rows]` int64 on the device. To be read when what `download` fetches has arrived.
    """

    def __init__(self, raw: Tensor, token_ids: Tensor, tops: Sequence[int], download: Download) -> None:
        values, ids = raw.topk(max(tops))
        self._tops = tops
        self._token_ids = download.fetch(token_ids)
        self._logprobs = download.fetch(raw.gather(1, token_ids[:, None])[:, 0])
        self._values, self._ids = download.fetch(values), download.fetch(ids)

    def read(self) -> list[TokenLogprobs]:
        """One entry per row."""
        rows = zip(
            self._token_ids.tolist(),
            self._logprobs.tolist(),
            self._ids.tolist(),
            self._values.tolist(),
            self._tops,
            strict=True,
        )
        return [
            TokenLogprobs(token, logprob, tuple(zip(ids[:top], values[:top], strict=True)))
            for token, logprob, ids, values, top in rows
        ]
