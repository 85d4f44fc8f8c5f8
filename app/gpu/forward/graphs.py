"""Pieces of decode steps as CUDA graphs, each replayed with one launch.

A step of a small batch is thousands of short kernels, and the host takes longer to launch them than the device to run
them. A graph launches them all at once, but at fixed addresses and in fixed sizes. So a step is padded to the next
bucket and copied into inputs that stay where they are, and its logits come out where they always do.

A graph of the whole step has no place where a client could look in or reach in. Where that is wanted, a step replays
the layers up to that place, does there what is to be done, and replays the others. All rows stay where they are: one
that has left, or has not joined yet, is padding meanwhile.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from app.gpu.forward.pieces import KeptGraphs, Piece, RunLayers, cut_run, run_piece
from app.gpu.kernels.attention.base import Batch
from app.gpu.models.base import TOLERANCE, LayerStack

logger = logging.getLogger(__name__)

PADDING = (0, 0, -1, 0)
"""Token id, position, slot block and slot offset of a padding row; its context and its block table are 0 (`Batch`)."""
KEPT_PASSES = 8
"""Graphs of pieces are kept with as many layers in all as so many whole steps have: enough for one armed layer at
batches of any size, or for eight layers at one size."""


def batch_buckets(largest: int) -> list[int]:
    """Batch sizes to record: 1, 2, 4, 8 and on in steps of 8, or of about an eighth where that is more, up to
    `largest`.
    """
    buckets, size = [], 1
    while size < largest:
        buckets.append(size)
        size += size if size < 8 else max(8, 1 << (size.bit_length() - 4))
    return [*buckets, largest]


def run_buckets(buckets: list[int]) -> list[int]:
    """Those that pieces are recorded for: powers of two, and the largest. A device that reads weights takes about as
    long for 33 rows as for 64, and each bucket has graphs for every piece.
    """
    return [bucket for bucket in buckets if bucket & (bucket - 1) == 0 or bucket == buckets[-1]]


class GraphInputs:
    """Room for `rows` rows of one token, each of at most `blocks` blocks. Graphs recorded with n rows read the first n.

    Block tables keep entries of earlier steps past a row's context, where no attention may look.
    """

    def __init__(self, rows: int, blocks: int, device: torch.device) -> None:
        self._padding = torch.tensor(PADDING, device=device)[:, None]
        self._columns = self._padding.repeat(1, rows)
        """`[4, rows]` int64: token ids, positions, slot blocks, slot offsets."""
        self._contexts = torch.zeros(rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros(rows, blocks, dtype=torch.int32, device=device)

    def first(self, rows: int) -> tuple[Tensor, Batch]:
        """Token ids and batch of the first `rows` rows, as views. The batch has no rows on the host: whatever reads
        them cannot be recorded, and must fail rather than keep what it has read.
        """
        token_ids, positions, slot_blocks, slot_offsets = (column[:rows] for column in self._columns)
        return token_ids, Batch(
            rows=(),
            decodes=rows,
            positions=positions,
            slot_blocks=slot_blocks,
            slot_offsets=slot_offsets,
            block_tables=self._tables[:rows],
            contexts=self._contexts[:rows],
        )

    def fill(self, token_ids: Tensor, batch: Batch, rows: int) -> None:
        """Copy a step in, behind what the device does now, and make padding of what is left of the first `rows`."""
        if self._columns.is_cuda:
            from app.gpu.forward.graph_triton_inputs import fill_inputs  # a CPU needs nothing of Triton

            fill_inputs(token_ids, batch, self._columns, self._contexts, self._tables, rows)
            return
        count, width = batch.block_tables.shape
        given = (token_ids, batch.positions, batch.slot_blocks, batch.slot_offsets)
        for column, values in enumerate(given):
            self._columns[column, :count].copy_(values)
        self._contexts[:count].copy_(batch.contexts)
        self._tables[:count, :width].copy_(batch.block_tables)
        if count < rows:
            self.clear(count, rows)

    def pad(self, places: Tensor) -> None:
        """Make padding of the rows at `places`, `[rows]` int64 on the device, until they are filled again."""
        self._columns.index_copy_(1, places, self._padding.expand(-1, len(places)))
        self._contexts.index_fill_(0, places, 0)
        self._tables[:, 0].index_fill_(0, places, 0)

    def clear(self, first: int, end: int) -> None:
        """Make padding of rows `[first, end)`."""
        self._columns[:, first:end] = self._padding
        self._contexts[first:end] = 0
        self._tables[first:end, 0] = 0


class Recorder(Protocol):
    """How a device keeps work that it can be told to do again. For one thread, in inference mode."""

    def record(self, work: Callable[[], None], *, concurrent: bool = False) -> Callable[[], None]:
        """What repeats the work that `work` gives the device: on the tensors that it found, whatever they hold then.

        `work` is also run, some times, on what they hold now. What is recorded later may use the memory of what was
        recorded earlier, so a replay's only result is what it writes to tensors from outside. Raises whatever `work`
        does, and RuntimeError if it waits for the device, which cannot be recorded.

        A `concurrent` recording waits for nothing that other threads give the device, such as copies of KV. Then `work`
        must be part of what has been recorded.
        """
        ...

    def forget(self) -> None:
        """Share no memory with earlier recordings: they have been released."""
        ...


class Graphs:
    """Pieces of decode steps that `recorder` has recorded, over one set of inputs, residual streams and logits.

    Whole steps are recorded at start, for each bucket of batch sizes. Other pieces are recorded when they have been
    wanted a few times; until then they run layer by layer, on the same tensors. So they do once more when they are
    checked. All methods are called in inference mode; readers of results use the stream of the call.
    """

    def __init__(self, stack: LayerStack, run_layers: RunLayers, recorder: Recorder, rows: int, blocks: int) -> None:
        """The largest step has so many rows, each of so many KV blocks."""
        self._stack, self._run_layers, self._recorder = stack, run_layers, recorder
        self.buckets = batch_buckets(rows)
        self.inputs = GraphInputs(rows, blocks, stack.device)
        self.hidden = torch.zeros(rows, stack.hidden_size, dtype=stack.dtype, device=stack.device)
        """`[rows, hidden_size]`: the residual stream of the rows that were taken, between two runs."""
        # One output for all: logits that a graph owned would be memory for it alone.
        self.logits = torch.empty(rows, stack.vocab_size, dtype=torch.float32, device=stack.device)
        """`[rows, vocab_size]`, which last until the next step and may be written to."""
        self._whole: dict[int, Callable[[], None]] = {}
        """By bucket."""
        self._run_buckets = run_buckets(self.buckets)
        self._bucket = rows
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
        self.inputs.fill(token_ids, batch, bucket)
        self._whole[bucket]()
        return self.logits[:rows]

    def take(self, token_ids: Tensor, batch: Batch, absent: Tensor | None) -> None:
        """The rows that the next runs are for: `[rows]` int64 token ids, and the places, `[absent]` int64, of those
        that are not there for now. Their part of `hidden` has no meaning.
        """
        self._bucket = self._run_buckets[bisect_left(self._run_buckets, len(token_ids))]
        self.inputs.fill(token_ids, batch, self._bucket)
        if absent is not None:
            self.inputs.pad(absent)

    def run(self, lo: int, hi: int) -> bool:
        """Take `hidden` through layers `[lo, hi)`, or, alone, through the head: to `logits`. Returns whether all of it
        was replayed.
        """
        replayed = True
        for piece in cut_run(self._bucket, lo, hi):
            replay = self._kept.find(piece)
            if replay is not None and piece in self._unchecked:
                self._check(piece, replay)
                replayed = False
            elif replay is not None:
                replay()
            else:
                self._work(piece)()
                replayed = False
        return replayed

    def record_due(self) -> None:
        """Record a piece that was not replayed, if it is wanted often: behind the work that has been launched. The rows
        are padding meanwhile, so that the rehearsal writes to no session's KV. `hidden` has no meaning afterwards.
        """
        piece = self._kept.due() if self._records else None
        if piece is None:
            return
        self._kept.make_room(piece)
        self.inputs.clear(0, piece.bucket)
        try:
            self._kept.keep(piece, self._recorder.record(self._work(piece), concurrent=True))
            self._unchecked.add(piece)
        except Exception as error:
            # The step that has been launched is none the worse, and those to come run as this one did.
            self._give_up(f"{type(error).__name__}: {error}")

    def _check(self, piece: Piece, replay: Callable[[], None]) -> None:
        """Replay a piece for the first time, and then run it layer by layer: those results and that KV stay. Its graph
        stays if it gives the same. Waits for the device.

        Padding would tell nothing: its attention is zero, whatever the position.
        """
        self._kept.drop(piece)
        self._unchecked.discard(piece)
        (_, lo, hi), out = piece, self._out(piece)
        given, batch = self._given(piece)
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

    def _given(self, piece: Piece) -> tuple[Tensor, Batch]:
        """What a piece begins with, token ids or the residual stream, and its batch. The batch is a new one each time:
        a stack may keep what it has made of one, and a graph would lack what makes it.
        """
        token_ids, batch = self.inputs.first(piece.bucket)
        return self.hidden[: piece.bucket] if piece.lo else token_ids, batch

    def _out(self, piece: Piece) -> Tensor:
        """Where a piece leaves its result."""
        return (self.logits if piece.hi > self._stack.num_layers else self.hidden)[: piece.bucket]

    def _work(self, piece: Piece) -> Callable[[], None]:
        """What a piece gives the device."""
        out = self._out(piece)

        def work() -> None:
            given, batch = self._given(piece)
            out.copy_(run_piece(self._stack, self._run_layers, piece.lo, piece.hi, given, batch))

        return work
