"""Pieces of a step: run layer by layer, or as CUDA graphs, each replayed with one launch.

A piece is stages `[lo, hi)` of the model over rows that stay the same. The stages are the L layers, and then the head;
the lowest piece begins with the embedding. So a whole step is the piece `[0, L + 1)`.

A step of a small batch is thousands of short kernels, and the host takes longer to launch them than the device to run
them. A graph launches them all at once, but at fixed addresses and in fixed sizes. So a step is padded to the next
bucket and copied into inputs that stay where they are, and its logits come out where they always do.

Where a client looks in or reaches in, a step replays the layers up to that place, does there what is to be done, and
replays the others. All rows stay where they are: one that has left, or has not joined yet, is padding meanwhile. Any
run of layers may be wanted: half the square of their number. Aligned pieces are only twice their number, and any run is
made of a few.
"""

import logging
import threading
import warnings
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from app.gpu.forward.inputs import FixedBatch, Places
from app.gpu.kernels.attention.base import Batch, Taps
from app.gpu.kv.pools import KVPool
from app.gpu.models.base import TOLERANCE, LayerStack

logger = logging.getLogger(__name__)

RunLayers = Callable[[int, int, Tensor, Batch], Tensor]
"""Runs layers `[lo, hi)`, at least one, on `hidden` `[tokens, hidden_size]` of a batch. The next call may write to its
result."""
RECORD_AFTER = 3
"""How often a piece runs without a graph before it has one: to record it takes about as long as that."""
KEPT_PASSES = 8
"""Graphs of pieces have as many layers as so many whole steps: those of one armed layer at batches of any size."""


def layer_by_layer(stack: LayerStack, pool: KVPool, on_layer: Callable[[], None] | None = None) -> RunLayers:
    """Calls one layer after the other, on any device, for any model and batch. `on_layer` is called before each."""

    def run_layers(lo: int, hi: int, hidden: Tensor, batch: Batch) -> Tensor:
        batches, group_of = batch.by_group(), pool.group_of
        for layer in range(lo, hi):
            if on_layer is not None:
                on_layer()
            hidden = stack.layer(layer, hidden, batches[group_of[layer]], pool.layer(layer))
        return hidden

    return run_layers


def run_piece(stack: LayerStack, run_layers: RunLayers, lo: int, hi: int, given: Tensor, batch: Batch) -> Tensor:
    """Run stages `[lo, hi)`, at least one, of a batch. `given` is `[tokens]` int64 token ids where `lo` is 0, else the
    residual stream `[tokens, hidden_size]`. Returns that, or behind the head float32 logits `[tokens, vocab_size]`.
    """
    layers = stack.num_layers
    hidden = given if lo else stack.embed(given, batch.positions)
    batch = batch if lo else replace(batch, token_ids=given)
    if batch.taps is not None:
        batch.taps.enter(hidden)
    if lo < layers:
        hidden = run_layers(lo, min(hi, layers), hidden, batch)
    return stack.head(hidden) if hi > layers else hidden


def batch_buckets(largest: int) -> list[int]:
    """Batch sizes to record, up to `largest`: 1, 2, 4, 8 and on in steps of 8, or of about an eighth where more."""
    buckets, size = [], 1
    while size < largest:
        buckets.append(size)
        size += size if size < 8 else max(8, 1 << (size.bit_length() - 4))
    return [*buckets, largest]


class Piece(NamedTuple):
    """Stages `[lo, hi)` over a batch of up to `bucket` rows. The memory of a graph grows with its stages."""

    bucket: int
    lo: int
    hi: int


def cut_run(bucket: int, lo: int, hi: int) -> list[Piece]:
    """The pieces of a run, from the lowest up: each has a power of two of stages, and begins at a multiple of that."""
    pieces = []
    while lo < hi:
        size = 1 << ((hi - lo).bit_length() - 1)
        if lo:
            size = min(size, lo & -lo)
        pieces.append(Piece(bucket, lo, lo + size))
        lo += size
    return pieces


class KeptGraphs:
    """Graphs of pieces, with at most `most_stages` stages in all: else the least recently replayed is evicted, and
    waits for a graph as it did at first. So pieces that are too many cost at most twice what they cost without graphs.
    """

    def __init__(self, most_stages: int, record_after: int = RECORD_AFTER) -> None:
        self._most_stages, self._record_after = most_stages, record_after
        self._replays = OrderedDict[Piece, Callable[[], None]]()
        self._wanted = Counter[Piece]()

    @property
    def stages(self) -> int:
        """Of all graphs together."""
        return sum(piece.hi - piece.lo for piece in self._replays)

    def find(self, piece: Piece) -> Callable[[], None] | None:
        """What replays it. None if there is no graph of it, which is noted."""
        replay = self._replays.get(piece)
        if replay is None:
            self._wanted[piece] += 1
        else:
            self._replays.move_to_end(piece)
        return replay

    def due(self) -> Piece | None:
        """The largest piece that has been wanted often enough, and fits. Evicts graphs until there is room for it."""
        often = (piece for piece, times in self._wanted.items() if times >= self._record_after)
        fitting = (piece for piece in often if piece.hi - piece.lo <= self._most_stages)
        due = max(fitting, key=lambda piece: piece.hi - piece.lo, default=None)
        while due is not None and self._replays and self.stages + due.hi - due.lo > self._most_stages:
            self._replays.popitem(last=False)
        return due

    def keep(self, piece: Piece, replay: Callable[[], None]) -> None:
        """Keep the graph of the piece that was due."""
        self._wanted.pop(piece, None)
        self._replays[piece] = replay

    def drop(self, piece: Piece) -> None:
        """Forget the graph of a piece."""
        del self._replays[piece]


@contextmanager
def waiting_forbidden() -> Iterator[None]:
    """Raise RuntimeError from work that makes the host wait, as far as PyTorch notices. Holds for all threads."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch calls the mode a prototype, once
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


_THREAD_LOCAL = "thread_local"
_CAPTURING = threading.Lock()
"""A process may have one capture under way at a time, whichever thread's it is."""


class CudaRecorder:
    """Keeps work of a device, which can then be told to do it again, as `torch.cuda.CUDAGraph`s in one memory pool. For
    one thread, in inference mode. A replay runs on what is the current stream then.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None], *, concurrent: bool = False) -> Callable[[], None]:
        """What repeats the work that `work` gives the device: on the tensors that it found, whatever they hold then.

        `work` is also run, some times, on what they hold now. What is recorded later may use the memory of what was
        recorded earlier, so a replay's only result is what it writes to tensors from outside. Raises whatever `work`
        does, and RuntimeError if it waits for the device. A `concurrent` recording waits for nothing that other threads
        give the device, such as copies of KV. Then `work` must be part of what has been recorded.

        Warms up on a side stream and captures on the same, as PyTorch asks for: kernels are compiled, libraries have
        their handles and workspaces for this stream, and none of that is in the graph.
        """
        caller, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        self._stream.wait_stream(caller)
        # A capture that fails to end leaves its stream the current one; this block sets that right.
        with torch.cuda.stream(self._stream), _CAPTURING:
            try:
                work()
                if not concurrent:
                    # A capture would not survive work that waits, and up to 2.11 PyTorch's allocator does not survive
                    # such a capture: it believes for ever that one is under way.
                    with waiting_forbidden():
                        work()
            finally:
                caller.wait_stream(self._stream)  # work that has failed half-way writes to tensors, too
            if concurrent:
                # `torch.cuda.graph` would wait for all streams first, among them those that move KV, and give back the
                # memory that PyTorch keeps for the next step.
                graph.capture_begin(self._pool, capture_error_mode=_THREAD_LOCAL)
                try:
                    work()
                finally:
                    graph.capture_end()
            else:
                # Another thread's copies are none of this capture's business.
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=_THREAD_LOCAL):
                    work()
        return graph.replay

    def forget(self) -> None:
        """Share no memory with earlier recordings: they have been released."""
        self._pool = torch.cuda.graph_pool_handle()


class Graphs:
    """Pieces of decode steps that `recorder` has recorded, over one set of inputs, residual streams and logits. Whole
    steps are recorded at start, for each bucket of batch sizes, other pieces when they have been wanted a few times;
    until then, and once more when they are checked, they run layer by layer, on the same tensors. All methods are
    called in inference mode; readers of results use the stream of the call.
    """

    def __init__(
        self, stack: LayerStack, run_layers: RunLayers, recorder: CudaRecorder, rows: int, blocks: int, groups: int
    ) -> None:
        """The largest step has so many rows, each of so many KV blocks of each group of layers."""
        self._stack, self._run_layers, self._recorder = stack, run_layers, recorder
        self._inputs = FixedBatch(rows, rows, blocks, stack.device, groups)
        self.hidden = torch.zeros(rows, stack.hidden_size, dtype=stack.dtype, device=stack.device)
        """`[rows, hidden_size]`: the residual stream of the rows that were taken, between two runs."""
        # One output for all: logits that a graph owned would be memory for it alone.
        self.logits = torch.empty(rows, stack.vocab_size, dtype=torch.float32, device=stack.device)
        """`[rows, vocab_size]`, which last until the next step and may be written to."""
        self.buckets = batch_buckets(rows)
        # A device that reads weights takes about as long for 33 rows as for 64, and each of these has all pieces.
        self._run_buckets = [each for each in self.buckets if each & (each - 1) == 0 or each == rows]
        self._bucket = rows
        """Of the rows that were taken."""
        self._whole: dict[int, Callable[[], None]] = {}
        """By bucket."""
        self._kept = KeptGraphs(KEPT_PASSES * (stack.num_layers + 1))
        self._unchecked = set[Piece]()
        """Pieces that have been recorded and not replayed yet."""
        self._records = True

    def record_whole(self, bucket: int) -> None:
        """Record whole steps of up to `bucket` rows."""
        self._whole[bucket] = self._recorder.record(self._work(Piece(bucket, 0, self._stack.num_layers + 1)))

    def replay_whole(self, token_ids: Tensor, batch: Batch) -> Tensor:
        """Logits `[rows, vocab_size]` of a step of one token a row, `[rows]` int64, each of which needs logits."""
        rows = len(token_ids)
        bucket = self.buckets[bisect_left(self.buckets, rows)]
        self._inputs.fill(token_ids, batch, bucket)
        self._whole[bucket]()
        return self.logits[:rows]

    def take(self, token_ids: Tensor, batch: Batch, absent: Places | None) -> None:
        """The rows that the next runs are for: `[rows]` int64 token ids. Those that are `absent` become padding."""
        self._bucket = self._run_buckets[bisect_left(self._run_buckets, len(token_ids))]
        self._inputs.fill(token_ids, batch, self._bucket)
        if absent is not None:
            self._inputs.clear(absent)

    def run(self, lo: int, hi: int) -> bool:
        """Take `hidden` through layers `[lo, hi)`, or the head to `logits`. Returns whether all of it was replayed."""
        replayed = True
        for piece in cut_run(self._bucket, lo, hi):
            replay = self._kept.find(piece)
            if replay is not None and piece not in self._unchecked:
                replay()
                continue
            if replay is None:
                self._work(piece)()
            else:
                self._check(piece, replay)
            replayed = False
        return replayed

    def run_tapped(self, lo: int, taps: Taps) -> None:
        """Take `hidden` through layer `lo`, which tells of its points: no graph can."""
        piece = Piece(self._bucket, lo, lo + 1)
        (given, out), batch = self._ends(piece), self._inputs.first(self._bucket, self._bucket)
        out.copy_(run_piece(self._stack, self._run_layers, lo, lo + 1, given, replace(batch, taps=taps)))

    def record_due(self) -> None:
        """Record a piece that is wanted often, behind the work that has been launched. The rows are padding meanwhile,
        so that the rehearsal writes to no session's KV. `hidden` has no meaning afterwards.
        """
        piece = self._kept.due() if self._records else None
        if piece is None:
            return
        self._inputs.clear(slice(piece.bucket))
        try:
            self._kept.keep(piece, self._recorder.record(self._work(piece), concurrent=True))
            self._unchecked.add(piece)
        except Exception as error:
            # The step that has been launched is not affected. Later steps run as it did.
            self._give_up(f"{type(error).__name__}: {error}")

    def _check(self, piece: Piece, replay: Callable[[], None]) -> None:
        """Replay a piece for the first time, and then run it layer by layer: those results and that KV stay. Its graph
        stays if it gives the same. Waits for the device. Padding would tell nothing: its attention is zero.
        """
        (_, lo, hi), (given, out), batch = piece, self._ends(piece), self._inputs.first(piece.bucket, piece.bucket)
        self._kept.drop(piece)
        self._unchecked.discard(piece)
        if out.data_ptr() == given.data_ptr():
            given = given.clone()
        replay()
        expected = run_piece(self._stack, self._run_layers, lo, hi, given, batch)
        error, size = out.sub_(expected).norm(dim=-1), expected.norm(dim=-1)
        out.copy_(expected)
        is_known = (batch.contexts > 0) & size.isfinite()  # edits of a client may have made numbers that are not
        if bool((is_known & ~(error <= TOLERANCE[self._stack.dtype] * size)).any()):
            self._give_up(f"stages {lo} to {hi} give other numbers when they are replayed")
        else:
            self._kept.keep(piece, replay)

    def _give_up(self, reason: str) -> None:
        logger.warning("no more runs of layers are recorded: %s", reason)
        self._records = False

    def _ends(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """Where a piece finds token ids or the residual stream, and where it leaves its result."""
        given = self.hidden if piece.lo else self._inputs.token_ids
        out = self.logits if piece.hi > self._stack.num_layers else self.hidden
        return given[: piece.bucket], out[: piece.bucket]

    def _work(self, piece: Piece) -> Callable[[], None]:
        """What a piece gives the device."""
        (bucket, lo, hi), (given, out) = piece, self._ends(piece)

        def work() -> None:
            # A new batch each time: a stack may keep what it has made of one, and a graph would lack what makes it.
            batch = self._inputs.first(bucket, bucket)
            out.copy_(run_piece(self._stack, self._run_layers, lo, hi, given, batch))

        return work
