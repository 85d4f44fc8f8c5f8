"""Pieces of a pass: how one runs layer by layer, how a run is cut into few of them, and which are worth a graph.

A piece is stages `[lo, hi)` of the model over rows that stay the same. The stages are the L layers, and then the head;
the lowest piece begins with the embedding. So a whole pass is the piece `[0, L + 1)`.

Any boundary may be armed, so any run of layers may be wanted: half the square of their number. Aligned pieces are only
twice their number, and any run is made of a few.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from app.gpu.kernels.attention.base import Batch
from app.gpu.kv.pools import KVPool
from app.gpu.models.base import LayerStack

RunLayers = Callable[[int, int, Tensor, Batch], Tensor]
"""Runs layers `[lo, hi)`, at least one, on `hidden` `[tokens, hidden_size]` of a batch. Returns the same shape, in
memory that may be written to again by the next call.
"""
RECORD_AFTER = 3
"""How often a piece runs without a graph before it has one: to record it takes about as long as that."""


def layer_by_layer(stack: LayerStack, pool: KVPool, on_layer: Callable[[], None] | None = None) -> RunLayers:
    """Calls one layer after the other, on any device, for any model and batch. `on_layer` is called before each."""

    def run_layers(lo: int, hi: int, hidden: Tensor, batch: Batch) -> Tensor:
        for layer in range(lo, hi):
            if on_layer is not None:
                on_layer()
            hidden = stack.layer(layer, hidden, batch, pool.layer(layer))
        return hidden

    return run_layers


def run_piece(stack: LayerStack, run_layers: RunLayers, lo: int, hi: int, given: Tensor, batch: Batch) -> Tensor:
    """Run stages `[lo, hi)`, at least one, of a batch.

    `given` is `[tokens]` int64 token ids where `lo` is 0, else the residual stream `[tokens, hidden_size]`. Returns the
    residual stream, or where the head is among the stages, float32 logits `[tokens, vocab_size]`.
    """
    layers = stack.num_layers
    hidden = given if lo else stack.embed(given, batch.positions)
    if lo < layers:
        hidden = run_layers(lo, min(hi, layers), hidden, batch)
    return stack.head(hidden) if hi > layers else hidden


def whole_pass(stack: LayerStack, run_layers: RunLayers, token_ids: Tensor, batch: Batch) -> Tensor:
    """Every stage over a batch of which each token needs logits: from `[tokens]` int64 to `[tokens, vocab_size]`."""
    return run_piece(stack, run_layers, 0, stack.num_layers + 1, token_ids, batch)


class Piece(NamedTuple):
    """Stages `[lo, hi)` over a batch of up to `bucket` rows."""

    bucket: int
    lo: int
    hi: int

    @property
    def stages(self) -> int:
        """How many there are. The memory of a graph grows with them."""
        return self.hi - self.lo


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
    """Graphs of pieces, with at most `most_stages` stages in all; the one that was replayed last gives way last.

    One that has given way waits as long for a graph as it did at first. So pieces that are too many to be kept cost at
    most twice what they cost without graphs.
    """

    def __init__(self, most_stages: int, record_after: int = RECORD_AFTER) -> None:
        self._most_stages, self._record_after = most_stages, record_after
        self._replays = OrderedDict[Piece, Callable[[], None]]()
        self._wanted = Counter[Piece]()

    @property
    def stages(self) -> int:
        """Of all graphs together."""
        return sum(piece.stages for piece in self._replays)

    def find(self, piece: Piece) -> Callable[[], None] | None:
        """What replays it. None if there is no graph of it, which is noted."""
        replay = self._replays.get(piece)
        if replay is None:
            self._wanted[piece] += 1
        else:
            self._replays.move_to_end(piece)
        return replay

    def due(self) -> Piece | None:
        """The largest piece that has been wanted often enough, and fits."""
        often = [piece for piece, times in self._wanted.items() if times >= self._record_after]
        fitting = (piece for piece in often if piece.stages <= self._most_stages)
        return max(fitting, key=lambda piece: piece.stages, default=None)

    def make_room(self, piece: Piece) -> None:
        """Let graphs go until there is room for one more."""
        while self._replays and self.stages + piece.stages > self._most_stages:
            self._replays.popitem(last=False)

    def keep(self, piece: Piece, replay: Callable[[], None]) -> None:
        """Keep the graph of a piece that there is room for."""
        self._wanted.pop(piece, None)
        self._replays[piece] = replay

    def drop(self, piece: Piece) -> None:
        """Let the graph of a piece go."""
        del self._replays[piece]
