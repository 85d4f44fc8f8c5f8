"""Running a planned step: everything is launched, nothing is waited for."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from app.domain.memory_map import StepCounts
from app.gpu.device.memory import is_out_of_memory
from app.gpu.device.staging import Download, Put, Staging
from app.gpu.device.streams import DeviceStreams
from app.gpu.forward.activations import HostTensor
from app.gpu.forward.batches import Batches
from app.gpu.forward.edits import DeviceVectors
from app.gpu.forward.launched import LaunchedStep, SplitStep, WholeStep
from app.gpu.forward.program_run import RunLayers
from app.gpu.forward.replayed import RecordedRuns, ReplayedWalk
from app.gpu.forward.results import PendingResult
from app.gpu.forward.walk import TokenIds, Walk, token_ids_of, whole_pass
from app.gpu.forward.watch import Watch
from app.gpu.kernels.attention.batch import Batch
from app.gpu.kv.pools import KVPool
from app.gpu.models.base import LayerStack
from app.gpu.sampling.logprobs import log_probabilities
from app.gpu.sampling.masks import MaskThread
from app.gpu.sampling.requests import SampleRequest
from app.gpu.state.checkpoints import Rows
from app.gpu.state.segments import GROW_AFTER, Row, SplitSize, split_off, without_draft

logger = logging.getLogger(__name__)

Decode = Callable[[Tensor, Batch], Tensor]
"""Every layer and the head over a batch of one token per row, each of which needs logits: `[rows]` int64 token ids to
float32 logits `[rows, vocab_size]`, which the caller may write to until the next call.
"""


class Runner:
    """Owns the model and the KV pool's tensor. Called from the engine thread, in inference mode."""

    def __init__(
        self,
        stack: LayerStack,
        pool: KVPool,
        streams: DeviceStreams,
        run_layers: RunLayers,
        replay: Decode | None = None,
        runs: RecordedRuns | None = None,
    ) -> None:
        """`replay` repeats whole decode steps that have been recorded, `runs` parts of them; None: none has been."""
        self.stack = stack
        self.pool = pool
        self._streams = streams
        self._staging = Staging(streams, stack.device)
        self._vectors = DeviceVectors(streams, stack.device)
        self._run_layers = run_layers
        self._decode = replay or partial(whole_pass, stack, run_layers)
        self._replays, self._runs = replay is not None, runs
        self._replayed = self._in_runs = self._eager = self._followed = self._tokens = 0
        self._split_size = SplitSize()
        self._batches = Batches(pool.block_size)
        self._masks = MaskThread()
        self._alone = 0
        """Steps to come that none may overlap, as memory was too short for two."""

    def counts(self) -> StepCounts:
        """The steps that have been launched."""
        return StepCounts(self._replayed, self._in_runs, self._eager, self._followed, self._tokens)

    @torch.inference_mode()
    def predict(self, parts: Sequence[Rows], top_k: int) -> list[list[tuple[int, float]]]:
        """Final norm and head on rows of residual streams: token ids with natural-log probabilities, best first (the
        logit lens; nostalgebraist, 2020). Waits for the device.
        """
        shape = (sum(end - first for _, first, end in parts), self.stack.hidden_size)
        hidden, begin = torch.empty(shape, dtype=self.stack.dtype, device=self.stack.device), 0
        for stored, first, end in parts:
            assert isinstance(stored, HostTensor)
            stored.load(hidden[begin : begin + end - first], first)
            begin += end - first
        best, download = log_probabilities(self.stack.head(hidden)).topk(top_k), Download(self._streams)
        values, ids = download.fetch(best.values), download.fetch(best.indices)
        download.finish().synchronize()
        return [list(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)]

    def launch(self, rows: list[Row], requests: Sequence[SampleRequest]) -> LaunchedStep:
        """Launch the layers of at least one row, and then the sampling of those that sample: `requests` are for the
        `choices` of each row in order.

        Out of memory is a queue: a step that does not fit is split, and its pieces run one after the other. An attempt
        that is given up half-way has left nothing but KV in its rows' own slots. The next one writes the same values
        there before it reads them, and nobody else reads them: blocks are hashed and shared only once their row has
        been accounted for. Drafts are the first to give way.
        """
        self._alone = max(0, self._alone - 1)
        wanted: dict[Row, list[SampleRequest]] = {}
        fits = sum(row.length for row in rows) <= self._split_size.limit
        waiting, pieces, unfit = deque(rows if fits else _without_drafts(rows)), list[WholeStep](), set[Row]()
        while waiting:
            piece = split_off(waiting, self._split_size.limit)
            asked = requests
            if piece != rows:
                wanted = wanted or _by_row(rows, requests)
                asked = [each for row in piece for each in wanted[row.whole][: row.choices]]
            launched = self._try(piece, asked)
            if launched is not None:
                pieces.append(launched)
                self._split_size.note_fit()
                continue
            torch.cuda.empty_cache()  # nothing of the attempt is referred to any more
            tokens = sum(row.length for row in piece)
            if any(row.draft for row in piece):
                waiting.extendleft(reversed(_without_drafts(piece)))
            elif tokens > 1:
                self._split_size.shrink(tokens)
                logger.warning("out of memory in %d tokens at once; going on with %d", tokens, self._split_size.limit)
                waiting.extendleft(reversed(piece))
            else:
                unfit.add(piece[0].whole)
                while waiting and waiting[0].whole is piece[0].whole:
                    waiting.popleft()
        return pieces[0] if len(pieces) == 1 and pieces[0].rows == rows else SplitStep(rows, pieces, unfit)

    def launch_overlapped(
        self, before: LaunchedStep, rows: list[Row], requests: Sequence[SampleRequest]
    ) -> LaunchedStep | None:
        """Launch rows of one token while the step `before` may still run. Each goes on from the token that its row
        there samples, and they have the order of those. None if memory is too short for both steps, or was a short
        while ago.
        """
        if self._alone:
            return None
        launched = self._try(rows, requests, before)
        if launched is None:
            self._alone = GROW_AFTER
        return launched

    def _try(
        self, rows: list[Row], requests: Sequence[SampleRequest], before: LaunchedStep | None = None
    ) -> WholeStep | None:
        """None if memory is too short. An exception that was handled further out would keep the tensors of its frames
        until then.
        """
        try:
            return self._launch(rows, requests, before)
        except Exception as error:
            if is_out_of_memory(error):
                return None
            raise

    def _launch(self, rows: list[Row], requests: Sequence[SampleRequest], before: LaunchedStep | None) -> WholeStep:
        self._staging.begin()
        put = self._staging.put
        pending = PendingResult(rows, requests, self.stack.vocab_size, self._streams, put, self._masks)
        try:
            return self._launch_pending(pending, rows, before, put)
        except Exception as error:
            if is_out_of_memory(error):
                pending.abandon()
            raise

    def _launch_pending(
        self, pending: PendingResult, rows: list[Row], before: LaunchedStep | None, put: Put
    ) -> WholeStep:
        token_ids = _place_tokens(rows, before, put)
        if self._are_plain(rows, ahead=before is not None):
            batch = self._batches.place(rows, put)
            self._staging.send()
            pending.launch(self._decode(token_ids(), batch))
            self._replayed += self._replays
            self._eager += not self._replays
            self._followed += before is not None
            self._tokens += len(rows)
            return WholeStep(rows, pending)
        walk = self._make_walk(rows, token_ids, put)
        self._staging.send()
        pending.launch(walk.run())
        self._in_runs += walk.replayed
        self._eager += not walk.replayed
        self._followed += before is not None
        self._tokens += sum(row.length for row in rows)
        if self._runs is not None and not walk.replayed:
            self._runs.record()
        return WholeStep(rows, pending, walk.stopped, walk.captured)

    def _are_plain(self, rows: Sequence[Row], *, ahead: bool) -> bool:
        """Whether all rows are plain. Of a step that is launched `ahead` each has one token that runs all layers."""
        if ahead:
            return not [row for row in rows if row.path.steps]
        return all(row.is_plain(self.stack.num_layers) for row in rows)

    def _make_walk(self, rows: list[Row], token_ids: TokenIds, put: Put) -> Walk | ReplayedWalk:
        watch = Watch(rows, put, self._streams, self._vectors)
        if self._runs is None or any(row.length > 1 for row in rows):
            return Walk(self.stack, self._run_layers, self._batches, rows, token_ids, put, watch)
        return ReplayedWalk(self._runs, self.stack.vocab_size, self._batches, rows, token_ids, put, watch)


def _place_tokens(rows: Sequence[Row], before: LaunchedStep | None, put: Put) -> TokenIds:
    """Those of the history, or where they are not known yet, those that the rows sample in the step `before`."""
    if before is None:
        known = put(token_ids_of(rows))
        return lambda: known
    sampled = before.tokens
    assert sampled is not None
    if len(rows) == len(before.rows):  # none has ended, and rows keep their order
        return lambda: sampled
    places = {row.sequence.session: place for place, row in enumerate(before.rows)}
    index = put(np.array([places[row.sequence.session] for row in rows], np.int64))
    return lambda: sampled[index]


def _by_row(rows: Iterable[Row], requests: Iterable[SampleRequest]) -> dict[Row, list[SampleRequest]]:
    """The requests for the choices of each row."""
    left = iter(requests)
    return {row: list(islice(left, row.choices)) for row in rows}


def _without_drafts(rows: Iterable[Row]) -> list[Row]:
    """The rows without their drafts, the shortest first again: those of one token come before short prompts."""
    return sorted(map(without_draft, rows), key=lambda row: row.length)
