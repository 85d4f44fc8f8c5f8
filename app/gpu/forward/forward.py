"""A planned step on its way up the layers: everything is launched, nothing is waited for."""

import logging
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.domain.activations import FeatureRows, LensAsk, LensRows
from app.domain.breakpoints import Intervention, TensorData
from app.domain.errors import AdapterMissing, FieldOutOfRange
from app.domain.memory_map import StepCounts
from app.domain.points import Point
from app.gpu.device.hardware import is_out_of_memory
from app.gpu.device.streams import DeviceStreams, Put, Staging, fetch
from app.gpu.forward.boundary import BoundaryActions, HostTensor, vectors_on
from app.gpu.forward.graphs import Graphs, RunLayers, run_piece
from app.gpu.forward.inputs import Batches, Places, place_runs
from app.gpu.forward.results import LaunchedStep, SplitStep
from app.gpu.forward.taps import LayerTaps
from app.gpu.forward.uploads import LoadedUploads, activations, translated
from app.gpu.kernels.attention.base import Batch
from app.gpu.kv.pools import KVPool
from app.gpu.models.adapters import Additions
from app.gpu.models.base import LayerStack
from app.gpu.sampling import SampleRequest
from app.gpu.sampling.sampler import log_probabilities
from app.gpu.state.checkpoints import Cell, InParts, Rows, join_cells
from app.gpu.state.paths import LoadCheckpoint, PassPlan
from app.gpu.state.segments import (
    GROW_AFTER,
    Row,
    Segment,
    SplitSize,
    cut_segments,
    find_alike,
    split_off,
    without_draft,
)
from app.machine.cores import free_from_core
from app.messages import Attribute, ReadFeatures
from app.settings import DRAFT_TOKENS

logger = logging.getLogger(__name__)


class StatesLost(Exception):
    """A step ran out of memory after its layers may have folded tokens into the states of some rows."""


MOST_NEURONS, UNITS_AT_ONCE = 2048, 32
"""Of a layer that are attributed: those that fire most, and so many in a part of the work."""


LENS_AT_ONCE, FEATURES_AT_ONCE = 32, 8
"""Residual streams that a lens takes through the head together, and that a dictionary reads together. Reading the
head's weights takes longer than multiplying a few streams with them: 32 take little more than twice as long as 8.
"""


class Runner:
    """Owns the model and the KV pool's tensor. Called from the engine thread, in inference mode."""

    def __init__(
        self,
        stack: LayerStack,
        pool: KVPool,
        streams: DeviceStreams,
        run_layers: RunLayers,
        graphs: Graphs | None,
        adapters: Mapping[str, Additions] = MappingProxyType({}),
    ) -> None:
        """`graphs` replay steps in which each row has one token, and none an adapter; None: every step runs by
        `run_layers`. `adapters` are those that are loaded, by digest.
        """
        self.stack = stack
        self.pool = pool
        self._streams, self._fetch = streams, partial(fetch, streams)
        self._staging = Staging(streams, stack.device)
        self._place_vector = vectors_on(stack.device, streams)
        self._run_layers, self._graphs = run_layers, graphs
        self._replayed = self._in_runs = self._eager = self._followed = self._tokens = 0
        self._split_size = SplitSize()
        self._all_layers = PassPlan(0, stack.num_layers)
        self._folds = pool.state_blocks > 0
        """Whether sequences have states: each row reads its own, and leaves another."""
        self._adapters = adapters
        self.uploads = LoadedUploads(stack.device)
        self._batches = Batches(pool.block_size, pool.groups, adapters)
        self._mask_thread = ThreadPoolExecutor(1, "djinn-masks", free_from_core)
        self._alone = 0
        """Steps to come that none may overlap, as memory was too short for two."""

    def counts(self) -> StepCounts:
        """The steps that have been launched."""
        return StepCounts(self._replayed, self._in_runs, self._eager, self._followed, self._tokens)

    @torch.inference_mode()
    def look(
        self,
        cells: Sequence[Cell],
        ask: LensAsk,
        ends: Mapping[int, Cell] = MappingProxyType({}),
        beside: Mapping[tuple[int, int], Cell] | None = None,
    ) -> InParts[LensRows]:
        """What a lens tells of cells. `ends` are the streams after the last layer by position, `beside` those of
        another session by layer and position. Without an uploaded lens it is the logit lens (nostalgebraist, 2020).
        Raises `NotFound` if the lens is not loaded.
        """
        rows, chosen, measures, others = list[Any](), list[Any](), list[Any](), list[Any]()
        for first in range(0, len(cells), LENS_AT_ONCE):
            some = cells[first : first + LENS_AT_ONCE]
            said = yield from self._said(some, ask)
            best = said.topk(ask.top_k)
            values, ids = self._fetch(best.values), self._fetch(best.indices)
            found = said[:, list(ask.chosen)]
            logprobs, ranks = self._fetch(found), found
            if ask.chosen:
                ranks = torch.stack([(said > said[:, token, None]).sum(-1) for token in ask.chosen], 1)
            ranks = self._fetch(ranks)
            yield None
            kept = [row for row, (_, position, *_) in enumerate(some) if ask.measures and position in ends]
            if kept:
                last = yield from self._head([ends[some[row][1]] for row in kept])
                gaps = self._fetch(divergence(log_probabilities(last), said[kept]))
            if ask.measures:
                entropies = self._fetch(-(said.exp() * said).nan_to_num(0.0).sum(-1))
                yield None
            paired = [row for row, cell in enumerate(some) if cell[:2] in (beside or ())]
            if paired:
                there = yield from self._said([(beside or {})[some[row][:2]] for row in paired], ask)
                here = said[paired]
                more = here.exp() - there.exp()
                most = more.abs().topk(ask.top_k).indices
                changed, changes = self._fetch(most), self._fetch(more.gather(1, most))
                apart = self._fetch(divergence(here, there))
            done = self._streams.compute.record()
            while not done.query():
                yield done.synchronize
            rows += map(_pairs, ids.tolist(), values.tolist())
            chosen += map(_pairs, ranks.long().tolist(), logprobs.tolist())
            if ask.measures:
                gap_of = dict(zip(kept, gaps.tolist(), strict=True)) if kept else {}
                measures += [(entropy, gap_of.get(row, math.nan)) for row, entropy in enumerate(entropies.tolist())]
            if beside is not None:
                told = list[Any]((math.nan, ()) for _ in some)
                if paired:
                    pairs = map(_pairs, changed.tolist(), changes.tolist())
                    for row, number, pair in zip(paired, apart.tolist(), pairs, strict=True):
                        told[row] = number, pair
                others += told
            yield None
        return LensRows(tuple(rows), chosen=tuple(chosen), measures=tuple(measures), others=tuple(others))

    def _said(self, cells: Sequence[Cell], ask: LensAsk) -> InParts[Tensor]:
        """The log-probabilities of all tokens that a lens reads in cells, float32 `[cells, vocab_size]`."""
        logits = yield from self._head(cells, ask)
        return log_probabilities(logits)

    def _head(self, cells: Sequence[Cell], ask: LensAsk | None = None) -> InParts[Tensor]:
        """What the head makes of cells, behind the matrices of an uploaded lens if one is asked for: float32 `[cells,
        vocab_size]`.
        """
        hidden, in_parts = self._load(join_cells(cells)), self.stack.head_in_parts
        if ask is not None and ask.lens:
            layers = [layer for layer, *_ in cells]
            hidden = yield from translated(hidden, layers, self.uploads.get(ask.lens), adds=ask.adds)
        if in_parts is None:
            return self.stack.head(hidden)
        return (yield from in_parts(hidden))

    @torch.inference_mode()
    def mean(self, parts: Sequence[Rows], normed: bool) -> Callable[[], TensorData]:
        """A function for any thread that waits for the mean of rows of residual streams, float32 `[hidden_size]`, with
        `normed` after the final norm of each.
        """
        hidden = self._load(parts)
        return self._fetched((self.stack.normed(hidden) if normed else hidden).float().mean(0))

    @torch.inference_mode()
    def logits(self, parts: Sequence[Rows], token_ids: tuple[int, ...] | None) -> Callable[[], TensorData]:
        """The same for the final norm and the head on rows of residual streams: `[rows, len(token_ids)]`, or
        `[rows, vocab_size]` without `token_ids`.
        """
        logits = self.stack.head(self._load(parts))
        return self._fetched(logits if token_ids is None else logits[:, list(token_ids)])

    def store(self, tensor: TensorData) -> HostTensor:
        """A tensor that has come from elsewhere, as sessions keep it."""
        return HostTensor.of(tensor, self._streams)

    def _fetched(self, tensor: Tensor) -> Callable[[], TensorData]:
        """A function for any thread that waits for a float32 tensor."""
        found, done = self._fetch(tensor), self._streams.compute.record()

        def read() -> TensorData:
            done.synchronize()
            return TensorData("float32", tuple(found.shape), found.numpy().tobytes())

        return read

    @torch.inference_mode()
    def features(self, cells: Sequence[Cell], asked: ReadFeatures) -> InParts[FeatureRows]:
        """What a dictionary makes of cells. Raises `NotFound` if it is not loaded."""
        rows, chosen = list[Any](), list[Any]()
        for first in range(0, len(cells), FEATURES_AT_ONCE):
            tensors = self.uploads.get(asked.digest)
            hidden = self._load(join_cells(cells[first : first + FEATURES_AT_ONCE]))
            found = activations(hidden, tensors, asked.k)
            best = found.topk(min(asked.top_k, found.shape[1]))
            values, ids = self._fetch(best.values), self._fetch(best.indices)
            wanted, done = self._fetch(found[:, list(asked.chosen)]), self._streams.compute.record()
            while not done.query():
                yield done.synchronize
            pairs = zip(ids.tolist(), values.tolist(), strict=True)
            rows += [tuple((i, value) for i, value in zip(*row, strict=True) if value > 0) for row in pairs]
            chosen += map(tuple, wanted.tolist())
            yield None
        return FeatureRows(tuple(rows), tuple(chosen))

    @torch.inference_mode()
    def attribute(
        self, cells: Sequence[Cell], streams: Sequence[bool], units: Sequence[tuple[Cell, Point, str]], asked: Attribute
    ) -> InParts[tuple[list[float], float, list[tuple[tuple[int, float], ...]]]]:
        """Direct logit attribution (Elhage et al., *A Mathematical Framework for Transformer Circuits*, 2021): what
        each cell adds to the logit of the first token less that of the second, with the final norm's scale held, and
        the whole difference. Of `streams` it is what each has more than the one before. The last cell is the stream
        after the last layer. Of `units` it is what each head adds, or each of the most important neurons, by number. A
        cap of logits makes parts approximate. Waits for the device. Raises `FieldOutOfRange` for units whose layer does
        more with them than to multiply, and `AdapterMissing`.
        """
        stack, rows = self.stack, self._load(join_cells(cells)).float()
        parts, before = rows.clone(), torch.zeros_like(rows[0])
        for index, is_stream in enumerate(streams):
            if is_stream:
                parts[index], before = rows[index] - before, rows[index]
        # The norm's gain, and whether it takes the mean away, follow from what it makes of vectors of length 1.
        signs = torch.ones_like(before)
        signs[1::2] = -1
        told = stack.normed(torch.stack([signs, signs.abs(), signs * 0, before]).to(stack.dtype)).float()
        gain, shift = (told[0] - told[2]) * signs, told[2]
        takes_mean = torch.allclose(told[1], shift, atol=1e-3)
        scaled = gain * (before - before.mean() if takes_mean else before)
        held = ((told[3] - shift) @ scaled) / (scaled @ scaled)
        first, second = asked.tokens
        difference = yield from stack.toward(first)
        difference = difference - (yield from stack.toward(second))
        toward = held * gain * difference
        toward = toward - toward.mean() if takes_mean else toward
        logits = stack.unembed(told[3:].to(stack.dtype))[0]
        inner = list[tuple[tuple[int, float], ...]]()
        for unit in units:
            inner.append((yield from self._units(*unit, toward, asked.neurons)))
        return (parts @ toward).tolist(), float(logits[first] - logits[second]), inner

    def _units(
        self, cell: Cell, point: Point, adapter: str, toward: Tensor, neurons: int
    ) -> InParts[tuple[tuple[int, float], ...]]:
        """What the heads of `z`, or neurons, write along `toward` `[hidden_size]` float32, by number."""
        layer, shape = cell[0], self.stack.points[point][cell[0]]
        assert shape is not None
        stands, count = self._load(join_cells([cell]))[0], shape.heads
        numbers = torch.arange(count, device=stands.device)
        if point is Point.MLP_POST:  # each by itself is a product with the whole matrix: those that hardly fire are not
            numbers = stands.float().abs().topk(min(MOST_NEURONS, len(stands))).indices
        if adapter and adapter not in self._adapters:
            raise AdapterMissing(f"the session's adapter, {adapter[:12]}, has been unloaded meanwhile")
        added, found = [(self._adapters[adapter], slice(None))] if adapter else [], list[Tensor]()
        nothing = self.stack.written(layer, point, torch.zeros_like(stands)[None], stands, added)
        if nothing is None:
            raise FieldOutOfRange(
                f"{point} of layer {layer} cannot be told apart here: its layer gates what it writes, or runs on "
                "Transformers' modules: delete these captures",
                param="positions",
            )
        for some in numbers.split(UNITS_AT_ONCE):
            yield None
            alone = torch.zeros(len(some), count, len(stands) // count, dtype=stands.dtype, device=stands.device)
            if point is Point.MLP_POST:
                alone = alone.view(len(some), -1).scatter_(1, some[:, None], stands[some][:, None])
            else:
                alone[torch.arange(len(some)), some] = stands.view(count, -1)[some]
                alone = alone.flatten(1)
            written = self.stack.written(layer, point, alone, stands, added)
            assert written is not None
            found.append((written - nothing) @ toward)
        values = torch.cat(found)
        if point is Point.MLP_POST:
            best = values.abs().topk(min(neurons, len(values))).indices
            numbers, values = numbers[best], values[best]
        return tuple(zip(numbers.tolist(), values.tolist(), strict=True))

    def _load(self, parts: Sequence[Rows]) -> Tensor:
        """The rows on the device, `[rows, width]`, of at least one part."""
        shape = (sum(end - first for _, first, end in parts), parts[0][0].shape[1])
        hidden, begin = torch.empty(shape, dtype=self.stack.dtype, device=self.stack.device), 0
        for stored, first, end in parts:
            assert isinstance(stored, HostTensor)
            stored.load(hidden[begin : begin + end - first], first)
            begin += end - first
        return hidden

    def close(self) -> None:
        """Join the thread of grammars' masks; no step is launched afterwards."""
        self._mask_thread.shutdown(cancel_futures=True)

    def launch(self, rows: list[Row], requests: Sequence[SampleRequest]) -> LaunchedStep | SplitStep:
        """Launch the layers of at least one row, and then the sampling of those that sample: `requests` are for the
        `choices` of each row in order.

        A step that memory is too short for is split, first from its drafts, and its parts run one after the other. An
        attempt that fails half-way has only written KV to the slots of its own rows. The next one writes the same
        values there before it reads them. No other session does: blocks are shared only once a row is accounted for.

        Raises `StatesLost` if such a step folds in place and has several tokens, be they drafted: it is not split, all
        rows go back to kept states, and the next steps have fewer.
        """
        self._alone = max(0, self._alone - 1)
        waiting, parts, unfit = deque[Row](), list[LaunchedStep](), set[Row]()
        limit = self._split_size.limit
        if limit == sys.maxsize or sum(row.length for row in rows) <= limit:
            launched = self._launch(rows, requests)
            if launched is not None:
                self._split_size.note_fit()
                return launched
            self._put_back(rows, waiting, unfit)
        else:
            waiting.extend(_without_drafts(rows))
        left = iter(requests)
        wanted = {row: list(islice(left, row.choices)) for row in rows}
        half_states = dict[Row, HostTensor]()
        while waiting:
            part = split_off(waiting, self._split_size.limit)
            asked = [each for row in part for each in wanted[row.whole][: row.choices]]
            launched = self._launch(part, asked, half_states=half_states)
            if launched is None:
                self._put_back(part, waiting, unfit)
            else:
                self._split_size.note_fit()
                parts.append(launched)
                half_states |= launched.half_states
        return SplitStep(rows, parts, unfit)

    def _put_back(self, part: list[Row], waiting: deque[Row], unfit: set[Row]) -> None:
        """Put a part that did not fit back to those that wait, to be tried in smaller ones, or to the `unfit`."""
        torch.cuda.empty_cache()  # nothing of the attempt is referred to any more
        tokens = sum(row.length for row in part)
        if any(row.draft for row in part):
            waiting.extendleft(reversed(_without_drafts(part)))
        elif tokens > 1:
            self._split_size.shrink(tokens)
            logger.warning("out of memory in %d tokens at once; going on with %d", tokens, self._split_size.limit)
            waiting.extendleft(reversed(part))
        else:
            self._give_up(part[0], waiting, unfit)

    def _give_up(self, cut: Row, waiting: deque[Row], unfit: set[Row]) -> None:
        """Count a planned row as unfit, and drop its other cuts."""
        unfit.add(cut.whole)
        while waiting and waiting[0].whole is cut.whole:
            waiting.popleft()

    def launch_overlapped(
        self, before: LaunchedStep | SplitStep, rows: list[Row], requests: Sequence[SampleRequest]
    ) -> LaunchedStep | None:
        """Launch rows of one token, in the order that they have in the step `before`, which may still run, and each
        from the token that it samples there. None if memory is too short for both steps, or was a short while ago.
        """
        if self._alone:
            return None
        launched = self._launch(rows, requests, before)
        if launched is None:
            self._alone = GROW_AFTER
        return launched

    def _launch(
        self,
        rows: list[Row],
        requests: Sequence[SampleRequest],
        before: LaunchedStep | SplitStep | None = None,
        half_states: Mapping[Row, HostTensor] = MappingProxyType({}),
    ) -> LaunchedStep | None:
        """None if memory is too short: an exception would keep the tensors of its frames until it is handled.
        `half_states` are what earlier cuts of rows that pause have left.
        """
        step: LaunchedStep | None = None
        folds_in_place = False
        try:
            self._staging.begin()
            stack, graphs, put = self.stack, self._graphs, self._staging.put
            if self._adapters and any(row.sequence.adapter for row in rows):
                graphs = None  # what adapters add is in no graph
            layers, decodes = stack.num_layers, rows[-1].length == 1  # and so have all one token: the longest is last
            step = LaunchedStep(rows, requests, stack.vocab_size, self._streams, put, self._mask_thread)
            token_ids, index = _place_tokens(rows, before, put)
            # Whether each row `is_plain`, without a call for each of hundreds.
            is_plain = decodes and len(requests) == len(rows)
            if is_plain and not [1 for row in rows if (path := row.path).steps or path.lo or path.hi != layers]:
                batch = self._batches.place(rows, put)
                states = RowStates(self.pool, self._batches, rows, {}, put, plain=True) if self._folds else None
                self._staging.send()
                token_ids = token_ids if index is None else token_ids[index]
                if states is not None:
                    states.read()
                    batch = states.give_all(batch)
                    folds_in_place = states.in_place
                if graphs is not None:
                    step.launch(graphs.replay_whole(token_ids, batch))
                    self._replayed += 1
                else:
                    step.launch(run_piece(stack, self._run_layers, 0, layers + 1, token_ids, batch))
                    self._eager += 1
                if states is not None:
                    states.write()
            else:
                actions = BoundaryActions(rows, put, self._streams, self._place_vector, self.uploads.get)
                in_place = graphs if decodes else None
                states = None
                if self._folds:
                    self._batches.tables_of([row.sequence for row in rows])
                    plain = all(row.choices == row.length and row.path == self._all_layers for row in rows)
                    states = RowStates(self.pool, self._batches, rows, half_states, put, plain=plain)
                    folds_in_place = states.in_place
                forward = Forward(stack, self._run_layers, in_place, self._batches, rows, actions, put, states)
                self._staging.send()
                token_ids = token_ids if index is None else token_ids[index]
                step.launch(forward.run(token_ids), actions)
                if states is not None:  # an attempt that does not fit has left them as they were
                    states.write()
                self._in_runs += forward.replayed
                self._eager += not forward.replayed
                if graphs is not None and not forward.replayed:
                    graphs.record_due()
        except Exception as error:
            if step is not None:
                step.abandon()
            tokens = sum(row.length for row in rows)
            if not is_out_of_memory(error) or (folds_in_place and tokens == 1):
                raise
            if folds_in_place:
                self._split_size.shrink(tokens)
                raise StatesLost(str(error)) from None
            return None
        self._followed += before is not None
        self._tokens += len(token_ids)
        return step


def _place_tokens(
    rows: Sequence[Row], before: LaunchedStep | SplitStep | None, put: Put
) -> tuple[Tensor, Tensor | None]:
    """The tokens of the rows, `[tokens]` int64: of the history, or as yet unknown those that the step `before` samples.
    Where an index comes with them, it tells which, once inputs have been sent.
    """
    if before is None:
        if rows[-1].length == 1:  # and so have all: the longest is last
            return put(np.array([row.sequence.tokens[row.first] for row in rows], np.int64)), None
        return put(np.array([token_id for row in rows for token_id in row.token_ids], np.int64)), None
    assert before.tokens is not None
    if len(rows) == len(before.rows):  # none has ended, and rows keep their order
        return before.tokens, None
    places = {row.sequence.session: place for place, row in enumerate(before.rows)}
    return before.tokens, put(np.array([places[row.sequence.session] for row in rows], np.int64))


def _without_drafts(rows: Iterable[Row]) -> list[Row]:
    """The rows without their drafts, the shortest first again: those of one token come before short prompts."""
    return sorted(map(without_draft, rows), key=lambda row: row.length)


def _place_kept(rows: Sequence[Row]) -> NDArray[np.int64]:
    """`Batch.state_blocks` of states in memory of their own: one of each row, then those behind drafted tokens."""
    drafts = np.array([len(row.draft) for row in rows])
    kept = np.full((len(rows), 1 + DRAFT_TOKENS, 1), -1, np.int64)  # a GPU compiles kernels for each width
    kept[:, 0, 0] = np.arange(len(rows))
    kept[:, 1:, 0][np.arange(DRAFT_TOKENS) < drafts[:, None]] = len(rows) + np.arange(drafts.sum())
    return kept


class RowStates:
    """The states of a step's rows, `[rows, words]`, in memory of their own until they replace those in the pool.

    A row that pauses leaves those in the pool as they are. What layers below have left goes with its checkpoint, and
    comes back when the pass goes on.

    On a CPU a plain step, whose rows decode and run all layers, folds into those in the pool: there a copy of a state
    takes as long as to fold a token. If it runs out of memory, the rows go back to earlier states.

    A step writes the state behind each drafted token to separate blocks of the pool. The session keeps the blocks of
    the last accepted token. In memory of their own, the states of drafted tokens follow those of all rows.
    """

    def __init__(
        self,
        pool: KVPool,
        batches: Batches,
        rows: Sequence[Row],
        half_states: Mapping[Row, HostTensor],
        put: Put,
        *,
        plain: bool = False,
    ) -> None:
        """`half_states`: what earlier cuts of planned rows that pause have left. The tables of the rows have been
        looked up in `batches`.
        """
        self.in_place = plain and pool.folds_in_place
        self._pool, self._rows, self._put = pool, rows, put
        self._kept: Tensor | None = None
        """`Batch.state_blocks`, where that is needed."""
        drafted = sum(len(row.draft) for row in rows)
        kept = batches.states_of(rows, pool.state_blocks)
        if drafted:
            later = kept[:, 1:]
            self._blocks = put(np.concatenate((kept[:, 0], later[later[:, :, 0] >= 0])))
            self._kept = put(kept if self.in_place else _place_kept(rows))
        else:
            self._blocks = put(kept[:, 0])
            self._kept = self._blocks[:, None] if self.in_place else None
        begins = [place for place, row in enumerate(rows) if not row.first]
        self._begins = put(np.array(begins, np.int64)) if begins else None
        self._ended: Places | None = slice(None)
        if not plain:
            ended = [(place, place + 1) for place, row in enumerate(rows) if not row.path.pauses]
            self._ended = place_runs([*ended, (len(rows), len(rows) + drafted)], put)
        self._below = dict[int, HostTensor]()
        """By place, of rows that have run some layers already."""
        for place, row in enumerate(() if plain else rows):
            checkpoint = row.sequence.checkpoint if row.path.lo else None
            below = None if checkpoint is None else checkpoint.states
            if half_states:
                below = half_states.get(row.whole, below)
            if below is not None:
                assert isinstance(below, HostTensor)
                self._below[place] = below
        self._members: dict[tuple[int, ...], tuple[Tensor, Tensor | None]] = {}
        """Of a segment that has not all rows: where the states of its rows are, and its `Batch.state_blocks`."""
        self._words: Tensor

    def note_segments(self, segments: Iterable[tuple[int, ...]]) -> None:
        """Take to the device which rows layers run together."""
        put, end, behind = self._put, len(self._rows), list[range]()
        for row in self._rows:
            behind.append(range(end, end + len(row.draft)))
            end += len(row.draft)
        for each in segments:
            if len(each) < len(self._rows):
                drafted = [place for member in each for place in behind[member]]
                kept = put(_place_kept([self._rows[place] for place in each])) if drafted else None
                self._members[each] = put(np.array([*each, *drafted], np.int64)), kept

    def read(self) -> None:
        """Launch reading them. A row without a past begins with zeros."""
        if self.in_place:
            if self._begins is not None:
                self._pool.blocks[self._blocks[self._begins]] = 0
            return
        self._words = self._pool.read_states(self._blocks[: len(self._rows)], room=len(self._blocks))
        if self._begins is not None:
            self._words[self._begins] = 0
        for place, below in self._below.items():
            below.load(self._words[place : place + 1].view(torch.uint8)[:, : below.shape[1]])

    def give_all(self, batch: Batch) -> Batch:
        """The batch of all rows with their states, which layers change in place."""
        states = self._pool.blocks if self.in_place else self._words.view(torch.uint8)
        return replace(batch, states=states, state_blocks=self._kept)

    def give(self, rows: tuple[int, ...], batch: Batch) -> Batch:
        """The batch of these rows with their states, which layers change."""
        if rows not in self._members:
            return self.give_all(batch)
        members, kept = self._members[rows]
        return replace(batch, states=self._words[members].view(torch.uint8), state_blocks=kept)

    def take(self, rows: tuple[int, ...], batch: Batch) -> None:
        """Keep the states that layers have left in the batch of these rows."""
        if rows in self._members and batch.states is not None:
            self._words[self._members[rows][0]] = batch.states.view(self._words.dtype)

    def below(self, place: int, boundary: int) -> Tensor | None:
        """A copy of what layers below the boundary have left of a row, `[1, bytes]`; None: none of them folds."""
        size = self._pool.state_bytes_below[boundary]
        return self._words[place : place + 1].view(torch.uint8)[:, :size].clone() if size else None

    def write(self) -> None:
        """Launch writing those of rows that have run all layers."""
        if self._ended is not None and not self.in_place:
            self._pool.write_states(self._blocks[self._ended], self._words[self._ended])


class Forward:
    """The rows of a step with their residual streams. Each row is at the boundary that it has reached. Without `graphs`
    the residual streams are packed, and a segment takes the part of its own rows through its layers. With them all rows
    have one token and stay in their places. Those that are not in the segment are padding meanwhile.

    The constructor puts the inputs on the device; they must be there before `run`. Where all rows go on from
    checkpoints, and nothing is embedded, it launches the copies of those too.
    """

    def __init__(
        self,
        stack: LayerStack,
        run_layers: RunLayers,
        graphs: Graphs | None,
        batches: Batches,
        rows: list[Row],
        actions: BoundaryActions,
        put: Put,
        states: RowStates | None,
    ) -> None:
        """`states` are those of a stack that folds; else None."""
        self._stack, self._run_layers, self._graphs = stack, run_layers, graphs
        self._rows, self._actions = rows, actions
        self.replayed = graphs is not None
        """Whether all that has run was replayed."""
        self._starts = starts = [0, *accumulate(row.length for row in rows)]
        ends = zip(starts[1:], rows, strict=True)
        self._outputs = place_runs([(end - row.outputs, end) for end, row in ends], put)
        """The tokens that need logits."""
        self._segments = cut_segments(rows)
        members = dict.fromkeys(segment.rows for segment in self._segments)
        self._run_together = list(members) == [tuple(range(len(rows)))]
        """Whether every layer that runs has all rows. Then each reads the output of the one before without a copy."""
        self._states = states
        if states is not None:
            states.note_segments(members)
        if graphs is not None:
            self._hidden, self._batch = graphs.hidden, batches.place(rows, put)
            everyone = np.arange(len(rows))
            self._absent = {each: put(np.delete(everyone, each)) if len(each) < len(rows) else None for each in members}
            return
        self._embeds = not all(row.path.lo for row in rows)
        if self._embeds:
            self._positions = put(np.concatenate([np.arange(row.first, row.first + row.length) for row in rows]))
        else:
            self._hidden = torch.empty(starts[-1], stack.hidden_size, dtype=stack.dtype, device=stack.device)
            self._load_checkpoints(range(len(rows)))
        self._placed = {
            each: (
                batches.place([rows[place] for place in each], put),
                place_runs([(starts[place], starts[place + 1]) for place in each], put),
            )
            for each in members
        }

    def run(self, token_ids: Tensor) -> Tensor:
        """Launch all, on `[tokens]` int64 ids. Returns float32 logits `[outputs, vocab_size]`: for each row in order,
        those of its last `row.outputs` tokens.
        """
        if self._graphs is not None:
            return self._run_in_place(self._graphs, token_ids)
        if self._embeds:
            self._hidden = self._stack.embed(token_ids, self._positions)
            self._load_checkpoints(place for place, row in enumerate(self._rows) if row.path.lo)
        if self._states is not None:
            self._states.read()
        placed = {
            rows: (replace(batch, token_ids=token_ids[index]), index) for rows, (batch, index) in self._placed.items()
        }
        for segment in self._segments:
            batch, index = placed[segment.rows]
            if self._states is not None:
                batch = self._states.give(segment.rows, batch)
            given, taps = self._hidden[index], self._taps(segment, [self._rows[place] for place in segment.rows])
            if taps is not None:
                taps.enter(given)
                batch = replace(batch, taps=taps.inside)
            found = self._run_layers(segment.lo, segment.hi, given, batch)
            if self._run_together:
                self._hidden = found
            else:
                self._hidden[index] = found
            if self._states is not None:
                self._states.take(segment.rows, batch)
            self._act(segment)
        if self._outputs is None:
            logits = self._hidden.new_empty(0, self._stack.vocab_size)
        else:
            logits = self._stack.head(self._hidden[self._outputs])
        self._act_on_head(logits)
        return logits

    def _run_in_place(self, graphs: Graphs, token_ids: Tensor) -> Tensor:
        taken: tuple[int, ...] | None = None
        if not self._segments:
            graphs.take(token_ids, self._batch, None)
        elif self._segments[0].lo:
            self._hidden.zero_()  # no embedding does: what earlier steps have left there must not grow for ever
        for segment in self._segments:
            if segment.rows != taken:
                taken = segment.rows
                graphs.take(token_ids, self._batch, self._absent[taken])
            self._load_checkpoints(place for place in taken if 0 < segment.lo == self._rows[place].path.lo)
            taps = self._taps(segment, self._rows)
            if taps is None:
                self.replayed &= graphs.run(segment.lo, segment.hi)
            else:
                graphs.run_tapped(segment.lo, taps)
                self.replayed = False
            self._act(segment)
        # Rows that have paused after the last layer.
        self._load_checkpoints(place for place, row in enumerate(self._rows) if row.path.lo == row.path.hi)
        if self._outputs is None:
            logits = self._hidden.new_empty(0, self._stack.vocab_size)
        else:
            layers = self._stack.num_layers
            self.replayed &= graphs.run(layers, layers + 1)
            logits = graphs.logits[self._outputs]
        self._act_on_head(logits)
        return logits

    def _taps(self, segment: Segment, rows: Sequence[Row]) -> LayerTaps | None:
        """Those of a segment inside of which something is done, for a batch of these rows: its own, or all."""
        if not any(self._rows[place].path.points_in(segment.hi) for place in segment.rows):
            return None
        members = range(len(rows)) if len(rows) == len(segment.rows) else segment.rows
        return LayerTaps(self._actions, segment.hi, rows, members)

    def _load_checkpoints(self, places: Iterable[int]) -> None:
        for place in places:
            self._actions.enter(self._rows[place], self._hidden_of(place, place + 1))

    def _hidden_of(self, first: int, end: int) -> Tensor:
        """The residual stream of rows `[first, end)`; writing to it changes them."""
        return self._hidden[self._starts[first] : self._starts[end]]

    def _act(self, segment: Segment) -> None:
        """Do what is marked at the segment's upper end. A row that pauses there is saved before the others go on."""
        rows, boundary = self._rows, segment.hi
        alike = [(place, place + 1) for place in segment.rows]
        if self._starts[-1] == len(rows):
            alike = find_alike(rows, segment.rows, boundary)
        for first, end in alike:
            row = rows[first]
            if row.path.steps:
                self._actions.act(row, boundary, self._hidden_of(first, end))
            if row.path.pauses is None or row.path.hi != boundary:
                continue
            inside, hidden = row.path.pauses is not Point.RESID_POST, None
            if not inside:
                hidden = self._hidden_of(first, end)
                hidden = hidden if self._graphs is None else hidden.clone()  # graphs run in its place
            states = None if self._states is None else self._states.below(first, boundary - inside)
            self._actions.stop(row, hidden, states)

    def _act_on_head(self, logits: Tensor) -> None:
        """Do what is marked behind the layers, and put logits that it changes in place, `[outputs, vocab_size]`. What
        is looked at there is computed for it, and for the tokens between: mostly few of a row's tokens need it for
        anything else.
        """
        boundary, end = self._stack.num_layers + 1, 0
        for place, row in enumerate(self._rows):
            end += row.outputs
            at_norm, at_logits = (row.path.at(boundary, point) for point in (Point.FINAL_NORM, Point.LOGITS))
            if not at_norm and not at_logits:
                continue
            marked, normed = (*at_norm, *at_logits), None
            changed = row.outputs > 0 and any(isinstance(step, Intervention) for step in marked)
            spans = [(step.runs[0].first, step.runs[-1].end) for step in marked if not isinstance(step, LoadCheckpoint)]
            if changed:
                spans.append((row.end - row.outputs, row.end))
            skipped, last = min(first for first, _ in spans) - row.first, max(end for _, end in spans) - row.first
            hidden = self._hidden_of(place, place + 1)[skipped:last]
            if at_norm:
                normed = self._stack.normed(hidden)
                self._actions.act(row, boundary, normed, Point.FINAL_NORM, skipped=skipped)
            if at_logits or changed:
                own = self._stack.head(hidden) if normed is None else self._stack.unembed(normed)
                self._actions.act(row, boundary, own, Point.LOGITS, skipped=skipped)
                if changed:
                    logits[end - row.outputs : end] = own[-row.outputs :]


def divergence(here: Tensor, there: Tensor) -> Tensor:
    """Kullback-Leibler, in nats, from log-probabilities `there` to those `here`, `[rows, vocab_size]`: `[rows]`."""
    return (here.exp() * (here - there)).nan_to_num(0.0).sum(-1)


def _pairs(ids: list[int], values: list[float]) -> tuple[tuple[int, float], ...]:
    return tuple(zip(ids, values, strict=True))
