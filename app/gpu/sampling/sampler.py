"""From logits to tokens and their log-probabilities, where the logits are: nothing here waits for the device.

Order of the steps, as the OpenAI and vLLM servers have it: log-probabilities are reported of the raw logits; then
bias, the minimum length, and penalties change them; then temperature, `top_k`, `top_p` and `min_p`, each on what the
one before left, as Transformers chains its warpers; then one draw. A grammar's mask comes before all changes.

The draw is a counter-based random number, Philox keyed by the request's seed at the position of the new token
(Salmon et al., 2011): there is no generator state to keep, so a session that is rewound, forked, preempted or moved
draws the same. No row's token depends on other rows, but for rounding: on CUDA the order of a sum in a softmax
changes with the number of rows, and a token at the very edge of `top_p`, or of what was drawn, may fall on either side.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from app.domain.values import SamplingParams, TokenLogprobs
from app.gpu.device.streams import DeviceStreams, Put, fetch
from app.gpu.sampling import GREEDY_BELOW, SampleRequest
from app.grammars.matcher import Matcher

CANDIDATES = 1024
"""Tokens that a CPU sorts first; nearly always enough to reach `top_p`, and 40 times cheaper than sorting a vocabulary.
A GPU would have to be waited for to see whether they were enough; `triton_draw.py` sorts nothing."""
WORD = 32
"""Tokens in one int32 of a mask."""
_ALIGNED = 4
"""Float32 numbers in 16 bytes."""

Changes = tuple[Tensor, Tensor]
"""One kind of change to logits: `[changes]` int64 tokens, each of them once, and `[changes]` float32 values. A token is
addressed as `row * vocab_size + token`, into the flattened logits of the rows that sample.
"""
Limits = tuple[Tensor, Tensor, Tensor]
"""Of draws, `[draws, 1]` each: `top_k` int64, where unlimited the vocabulary's size, `top_p` and `min_p` float32."""
Draws = tuple[Tensor, Tensor, Tensor, Limits | None]
"""Rows that draw their token, `[draws]` int64, `[draws, 1]` float64 from 0 to 1, float32 temperatures, and limits."""
SamplingInputs = tuple[Mapping[str, Changes], Sequence[Draws]]
"""The requests of a step. Changes are "bias", "forbidden", "repetition" and "counts", where a row asks for them."""
ReadReport = Callable[[], list[TokenLogprobs]]
"""Gives one entry per row; to be called when what was fetched has arrived."""


def place_requests(requests: Sequence[SampleRequest], vocab_size: int, put: Put) -> SamplingInputs:
    """Lay out the requests of the rows of logits, in their order, as arrays that `put` takes to the device."""
    found = defaultdict[str, list[tuple[NDArray[np.int64], NDArray[np.float32]]]](list)
    free, limited = list[int](), list[int]()
    for row, request in enumerate(requests):
        params = request.params
        if params.logit_bias or request.forbidden or request.seen is not None:
            for kind, tokens, values in _changes(request):
                addressed = row * vocab_size + np.asarray(tokens, np.int64)
                found[kind].append((addressed, np.broadcast_to(np.asarray(values, np.float32), addressed.shape)))
        if params.temperature >= GREEDY_BELOW:
            (limited if params.top_k > 0 or params.top_p < 1 or params.min_p > 0 else free).append(row)
    changes, draws = dict[str, Changes](), list[Draws]()
    for kind, parts in found.items():
        every_token, every_value = zip(*parts, strict=True)
        changes[kind] = put(np.concatenate(every_token)), put(np.concatenate(every_value))
    for rows in filter(None, (free, limited)):
        chosen = [requests[row] for row in rows]
        params_of = [each.params for each in chosen]
        numbers = uniforms([each.seed for each in params_of], [each.position for each in chosen])
        temperatures = np.array([each.temperature for each in params_of], np.float32)
        limits = _place_limits(params_of, vocab_size, put) if rows is limited else None
        draws.append((put(np.array(rows, np.int64)), put(numbers[:, None]), put(temperatures[:, None]), limits))
    return changes, draws


def _changes(request: SampleRequest) -> Iterator[tuple[str, ArrayLike, ArrayLike]]:
    """Each kind of change that the request asks for: its tokens, and a value for each of them, or one for all."""
    params = request.params
    if params.logit_bias:
        yield "bias", list(params.logit_bias), list(params.logit_bias.values())
    if request.forbidden:
        yield "forbidden", list(request.forbidden), -np.inf
    if request.seen is None:
        return
    tokens, generated = request.seen
    if params.repetition_penalty != 1 and tokens:
        yield "repetition", tokens, params.repetition_penalty
    times = np.array(generated, np.float64)
    is_generated = times > 0
    if (params.presence_penalty or params.frequency_penalty) and is_generated.any():
        taken_off = params.presence_penalty + params.frequency_penalty * times[is_generated]
        yield "counts", np.array(tokens, np.int64)[is_generated], taken_off


def _place_limits(params: Sequence[SamplingParams], vocab_size: int, put: Put) -> Limits:
    top_k = np.array([min(each.top_k or vocab_size, vocab_size) for each in params], np.int64)
    top_p = np.array([each.top_p for each in params], np.float32)
    min_p = np.array([each.min_p for each in params], np.float32)
    return put(top_k[:, None]), put(top_p[:, None]), put(min_p[:, None])


# Philox4x64-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011), as NumPy's `Philox` computes
# it: all numbers of a step at once, each in 128 bits of Python's long integers, where 64 bits times 64 bits fit. To
# make a generator of NumPy's for one number takes longer than a hundred of them.
_LANE_BYTES, _WORD_BITS, _ROUNDS = 16, 64, 10
_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_INCREMENTS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_SPARE_BITS, _DOUBLE = np.uint64(11), 2.0**-53


def uniforms(keys: Sequence[int], counters: Sequence[int]) -> NDArray[np.float64]:
    """For each key, below 2^128, and counter, below 2^64 - 1, what `numpy.random.Generator(numpy.random.Philox(key=key,
    counter=counter)).random()` returns, from 0 to below 1: `[keys]`.
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


class Mask:
    """Tokens that grammars allow in a step, found while the device runs it. Nothing else may use the matchers then."""

    def __init__(
        self, matchers: Mapping[int, Matcher], vocab_size: int, streams: DeviceStreams, put: Put, thread: Executor
    ) -> None:
        """Begin with the masks of `matchers`, by row of logits, on `thread`. llguidance releases the GIL meanwhile."""
        self._streams = streams
        self._bits = streams.host_tensor((len(matchers), -(-vocab_size // WORD)), torch.int32)
        self._filled = thread.submit(_fill, list(matchers.values()), self._bits.numpy())
        self.rows = put(np.array(list(matchers), np.int64))
        """Those of logits, `[matchers]` int64 on the device."""

    def apply(self, logits: Tensor) -> None:
        """Wait for the masks, and have `apply_mask` change `[rows, vocab_size]` float32 in place."""
        self._filled.result()
        bits = self._bits
        if not self._streams.on_host:
            bits = torch.empty_like(self._bits, device=logits.device)
            self._streams.compute.copy(bits, self._bits)
        apply_mask(logits, self.rows, bits)

    def abandon(self) -> None:
        """Drop the masks of a step that will not run. Afterwards the matchers may be used again."""
        if not self._filled.cancel():
            self._filled.exception()  # waits


def apply_mask(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set logits to minus infinity where a bit is 0, in place. All tensors are on one device.

    `logits` is dense `[rows, vocab_size]` float32. `rows` `[masked]` int64 are the rows of the masks, each at most
    once; `bits` `[masked, words]` int32 has a bit for each token, the lowest of a word first.
    """
    if logits.device.type == "cpu":
        from app.gpu.kernels.cpu.elementwise import forbid

        forbid(logits, rows, bits)
    else:
        forbid_on_device(logits, rows, bits)


def forbid_on_device(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """`apply_mask` with PyTorch's operators, which run anywhere."""
    shifts = torch.arange(WORD, dtype=torch.int32, device=logits.device)
    allowed = ((bits[:, :, None] >> shifts) & 1).bool().flatten(1)[:, : logits.shape[1]]
    logits.index_copy_(0, rows, logits[rows].masked_fill(~allowed, -torch.inf))


def _fill(matchers: Sequence[Matcher], bits: NDArray[np.int32]) -> None:
    """Write one row of `bits` for each matcher. A row whose matcher has an error allows all: its turn will fail."""
    for matcher, row in zip(matchers, bits, strict=True):
        matcher.fill(row.ctypes.data, row.nbytes)
        if matcher.error is not None:
            row.fill(-1)


def choose(logits: Tensor, inputs: SamplingInputs, *, on_host: bool) -> tuple[Tensor, Tensor]:
    """One token per row, `[rows]` int64, and each row's highest logit, which is NaN if one of the row's is. `logits` is
    float32 `[rows, vocab_size]`, dense; it is changed in place.

    `on_host`: the device is the CPU.
    """
    (changes, every_draw), flat = inputs, logits.view(-1)
    if "bias" in changes:
        flat.index_add_(0, *changes["bias"])
    if "forbidden" in changes:
        flat.index_copy_(0, *changes["forbidden"])
    if "repetition" in changes:
        tokens, penalty = changes["repetition"]
        value = flat[tokens]
        flat.index_copy_(0, tokens, torch.where(value > 0, value / penalty, value * penalty))
    if "counts" in changes:
        flat.index_add_(0, *changes["counts"], alpha=-1)
    if on_host:  # through NumPy, which takes a tenth of PyTorch's time for it
        chosen = torch.from_numpy(logits.numpy().argmax(axis=-1))
        highest = logits.gather(1, chosen[:, None])[:, 0]
    else:
        highest, chosen = logits.max(dim=-1)
    for rows, uniforms, temperatures, limits in every_draw:
        probabilities = torch.softmax(logits[rows] / temperatures, dim=-1)
        chosen.index_copy_(0, rows, _draw(probabilities, uniforms, limits, on_host))
    return chosen, highest


def _draw(probabilities: Tensor, uniforms: Tensor, limits: Limits | None, on_host: bool) -> Tensor:
    """Draw from the tokens that the limits leave, `[draws]` int64, or from the whole vocabulary."""
    if not on_host:
        from app.gpu.sampling.triton_draw import draw  # imports Triton, which only a GPU needs

        return draw(probabilities, uniforms, *(limits or ()))
    vocab_size = probabilities.shape[1]
    if limits is None:
        return _invert(probabilities, uniforms).clamp(max=vocab_size - 1)[:, 0]
    if vocab_size <= CANDIDATES:
        return _draw_sorted(*probabilities.sort(descending=True), uniforms, limits, vocab_size)
    values, ids = probabilities.topk(CANDIDATES)
    chosen = _draw_sorted(values, ids, uniforms, limits, vocab_size)
    top_k, top_p, min_p = limits
    # Whether no token past the sorted ones could pass the limits.
    reached_top_p = (top_p < 1) & (values.sum(-1, keepdim=True) >= top_p)
    below_min_p = values[:, -1:] < min_p * values[:, :1]
    suffices = ((top_k >= vocab_size) & (reached_top_p | below_min_p)) | (top_k <= CANDIDATES)
    short = (~suffices[:, 0]).nonzero()[:, 0]
    if len(short):
        values, ids = probabilities[short].sort(descending=True)
        own = top_k[short], top_p[short], min_p[short]
        chosen[short] = _draw_sorted(values, ids, uniforms[short], own, vocab_size)
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


def _invert(values: Tensor, uniforms: Tensor) -> Tensor:
    """Where the running sums of `values` `[draws, candidates]` pass that share of their total: `[draws, 1]` int64."""
    cumulative = values.double().cumsum(dim=-1)
    return torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)


def log_probabilities(logits: Tensor) -> Tensor:
    """Natural logarithms of the softmax, `[rows, vocab_size]`, in a new tensor.

    PyTorch's kernel on CUDA sums a row in an order that depends on how far the row begins from a multiple of 16 bytes.
    It takes dense rows only, so each is filled up with logits that add nothing.
    """
    vocab_size = logits.shape[1]
    if logits.is_cuda and vocab_size % _ALIGNED:
        logits = F.pad(logits, (0, -vocab_size % _ALIGNED), value=-torch.inf)
    return torch.log_softmax(logits, dim=-1)[:, :vocab_size]


def report(raw: Tensor, token_ids: Tensor, tops: Sequence[int], streams: DeviceStreams) -> ReadReport:
    """The log-probabilities of one token in each row of `raw` `[rows, vocab_size]`, and the best `tops[i]` of row i.

    `token_ids` is `[rows]` int64 on the device.
    """
    best, chosen = raw.topk(max(tops)), raw.gather(1, token_ids[:, None])[:, 0]
    fetched = [fetch(streams, each) for each in (token_ids, chosen, best.indices, best.values)]

    def read() -> list[TokenLogprobs]:
        rows = zip(*(each.tolist() for each in fetched), tops, strict=True)
        return [
            TokenLogprobs(token, logprob, tuple(zip(ids[:top], values[:top], strict=True)))
            for token, logprob, ids, values, top in rows
        ]

    return read
