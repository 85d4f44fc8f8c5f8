"""Carrying out commands about maps of what a session keeps: opened once, read slice by slice between steps."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from app.domain.activations import MAX_MAP_POSITIONS, ActivationMap, ActivationNorms, LensRows
from app.domain.breakpoints import Positions, TensorData
from app.domain.errors import FieldOutOfRange, WrongState
from app.gpu.state.activation_map import Cell, Rows, describe, find_cells, join_rows, kept_extent
from app.gpu.state.conditions import Span
from app.gpu.state.sequence import TokenSequence
from app.messages import MapLens, OpenMap, ReadNorms

Predict = Callable[[Sequence[Rows], int], list[list[tuple[int, float]]]]
"""For each of the rows, the most likely tokens after the final norm and the head."""


def open_map(sequence: TokenSequence, command: OpenMap) -> ActivationMap:
    """Hold on to the cells of now until `CloseMap`. Raises `FieldOutOfRange`."""
    sequence.map, found = _find(sequence, command)
    return found


def map_lens(sequence: TokenSequence, command: MapLens, predict: Predict) -> LensRows:
    """The lens of a slice of the session's map. Raises `WrongState` if none is open."""
    if sequence.map is None:
        raise WrongState(f"session {command.session} has no map open")
    began = time.perf_counter()
    rows = predict(join_rows(sequence.map[command.first : command.end]), command.top_k)
    return LensRows(tuple(map(tuple, rows)), time.perf_counter() - began)


def read_norms(sequence: TokenSequence, command: ReadNorms) -> Callable[[], ActivationNorms]:
    """A function for any thread that measures the residual streams of now. Raises `FieldOutOfRange`."""
    return partial(_measure, *_find(sequence, command), command.vector)


def _find(sequence: TokenSequence, command: OpenMap | ReadNorms) -> tuple[tuple[Cell, ...], ActivationMap]:
    log, checkpoint, layers = sequence.captures, sequence.checkpoint, command.layers
    kept = kept_extent(log, checkpoint, layers)
    first, end = _chosen_span(command.positions, kept, len(sequence.tokens))
    cells = find_cells(log, checkpoint, layers, first, end)
    return cells, describe(cells, first, end, kept, sequence.tokens)


def _chosen_span(positions: Positions, kept: Span, length: int) -> Span:
    """The positions of the map: all that are kept, the last of them, or any of the history."""
    if positions.last:
        return max(kept[0], kept[1] - 1), kept[1]
    first, end = kept if positions.end is None else (positions.first, positions.end)
    if end > length:
        raise FieldOutOfRange(f"positions must be within 0:{length}, the session's history", param="positions")
    if end - first > MAX_MAP_POSITIONS:
        raise FieldOutOfRange(
            f"positions: a map has at most {MAX_MAP_POSITIONS}, not {end - first}; {kept[0]}:{kept[1]} are kept",
            param="positions",
        )
    return first, end


def _measure(cells: Sequence[Cell], found: ActivationMap, vector: TensorData | None) -> ActivationNorms:
    by_layer: defaultdict[int, list[Cell]] = defaultdict(list)
    for cell in cells:
        by_layer[cell.layer].append(cell)
    rows = [join_rows(each) for each in by_layer.values()]
    norms = tuple(tuple(n for stored, a, b in each for n in stored.norms(a, b)) for each in rows)
    if vector is None:
        return ActivationNorms(found, norms, None)
    cosines = tuple(tuple(c for stored, a, b in each for c in stored.cosines(a, b, vector)) for each in rows)
    return ActivationNorms(found, norms, cosines)
