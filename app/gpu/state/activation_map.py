"""A map of the residual streams that a session keeps, over layers and positions, as they were at one moment."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from app.domain.activations import ActivationMap, MapLayer
from app.gpu.state.checkpoints import Captured, CaptureLog, Checkpoint, StoredTensor

Rows = tuple[StoredTensor, int, int]
"""Rows `[first, end)` of a residual stream."""
Layers = Collection[int] | None
"""None: all."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One residual stream `[hidden_size]`: a row of what was saved after `layer`. Nothing changes it."""

    layer: int
    position: int
    hidden: StoredTensor
    row: int


def kept_extent(log: CaptureLog, checkpoint: Checkpoint | None, layers: Layers) -> tuple[int, int]:
    """The first and the end of all positions whose residual stream is kept after any of `layers`; 0, 0 if none is."""
    spans = [(record.positions[0], last + 1) for record, last in _current(log, layers)]
    if checkpoint is not None and _wants(layers, checkpoint.boundary - 1):
        spans.append((checkpoint.first, checkpoint.end))
    return (min(first for first, _ in spans), max(end for _, end in spans)) if spans else (0, 0)


def find_cells(
    log: CaptureLog, checkpoint: Checkpoint | None, layers: Layers, first: int, end: int
) -> tuple[Cell, ...]:
    """The cells at positions `[first, end)`: the last that was captured there, and before all the checkpoint, which may
    have been edited.
    """
    found: defaultdict[int, dict[int, Cell]] = defaultdict(dict)
    for record, last in _current(log, layers):
        if record.positions[0] < end and first <= last:
            for row in range(bisect_left(record.positions, first), bisect_left(record.positions, min(end, last + 1))):
                position = record.positions[row]
                found[record.layer][position] = Cell(record.layer, position, record.hidden, row)
    if checkpoint is not None and _wants(layers, layer := checkpoint.boundary - 1):
        for position in range(max(first, checkpoint.first), min(end, checkpoint.end)):
            found[layer][position] = Cell(layer, position, checkpoint.hidden, position - checkpoint.first)
    return tuple(found[layer][position] for layer in sorted(found) for position in sorted(found[layer]))


def describe(
    cells: Iterable[Cell], first: int, end: int, kept: tuple[int, int], token_ids: Sequence[int]
) -> ActivationMap:
    """The map of `cells` as a client sees it. `token_ids` are those of the whole history."""
    layers: defaultdict[int, list[int]] = defaultdict(list)
    for cell in cells:
        layers[cell.layer].append(cell.position)
    return ActivationMap(
        first,
        end,
        *kept,
        tuple(token_ids[first:end]),
        tuple(MapLayer(layer, tuple(positions)) for layer, positions in layers.items()),
    )


def join_rows(cells: Iterable[Cell]) -> list[Rows]:
    """The rows of `cells` in their order, with as few pieces as there can be."""
    joined: list[Rows] = []
    for cell in cells:
        if joined and joined[-1][0] is cell.hidden and joined[-1][2] == cell.row:
            joined[-1] = (cell.hidden, joined[-1][1], cell.row + 1)
        else:
            joined.append((cell.hidden, cell.row, cell.row + 1))
    return joined


def _current(log: CaptureLog, layers: Layers) -> Iterator[tuple[Captured, int]]:
    """Records of these layers with positions of the history, each with the last such position."""
    for record in log.records:
        if _wants(layers, record.layer):
            last = record.positions[-1]
            if last >= record.current_to:
                count = bisect_left(record.positions, record.current_to)
                if not count:
                    continue
                last = record.positions[count - 1]
            yield record, last


def _wants(layers: Layers, layer: int) -> bool:
    return layers is None or layer in layers
