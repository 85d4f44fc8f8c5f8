"""Carrying out commands that look into the model of a session, or change what it computes there: breakpoints, captures,
the checkpoint of a paused turn, and maps of all residual streams that a session keeps.
"""

from __future__ import annotations

import math
import sys
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app import messages
from app.domain.activations import (
    MAX_MAP_POSITIONS,
    Activation,
    ActivationMap,
    ActivationNorms,
    Attribution,
    Capture,
    Captures,
    FeatureRows,
    LensAsk,
    LensRows,
    MapLayer,
    PausedTurn,
)
from app.domain.breakpoints import Breakpoint, Edit, EditOp, Intervention, Need, Pass, Positions, TensorData
from app.domain.errors import ActivationsFull, FieldOutOfRange, UploadInUse, WrongState
from app.domain.points import STREAM, Point, names_of, place_of
from app.domain.positions import runs_of
from app.gpu.kv.placement import Placement
from app.gpu.planning.turns import Match
from app.gpu.state.checkpoints import (
    Captured,
    Cell,
    CellMap,
    Checkpoint,
    InParts,
    KeptRows,
    Rows,
    T,
    join_cells,
    kept_rows,
)
from app.gpu.state.interventions import InterventionLog
from app.gpu.state.paths import Span
from app.gpu.state.sequence import ActivationRoom, TokenSequence, TurnState

if TYPE_CHECKING:
    from app.gpu.forward.forward import Runner

Handler = Callable[[TokenSequence, Any], object]
"""Carries out a command on its session; returns what `Done` answers."""


ADDED = (Point.ATTN_OUT, Point.MLP_OUT, Point.RESID_POST)
"""Points whose numbers are added to the residual stream, and the stream itself."""
WRITING = (Point.Z, Point.MLP_POST)
"""Points before a projection that writes to it: each head or neuron writes by itself."""
SHARE = 0.02
"""Of the engine's time, that all looks together take while turns are under way."""
MOST_SAVED_S = 0.03
"""Most of that share that is saved for later: a first look is done at once, and a long step is not made up for."""
AT_ONCE_S = 0.02
"""How long a look goes on while there are no steps, before commands that have come are carried out."""


class Gaps:
    """Lets looks into the model go on between steps. Each is done in parts, as many as its share of the time allows.
    Tenants have equal shares, and so have the looks of one tenant.
    """

    def __init__(self) -> None:
        self.looks = Counter[str]()
        """How many of each tenant are not done yet."""
        self._saved_s = 0.0
        """What all looks together may take. It is below zero after a long part."""
        self._each_s = 0.0
        """What those of each tenant may take before the next step."""
        self._opened_at = -math.inf
        self._is_busy = False

    def open(self, *, is_busy: bool) -> None:
        """Another gap begins. `is_busy`: behind it is a step."""
        now, self._is_busy = time.perf_counter(), is_busy
        self._saved_s = min(MOST_SAVED_S, self._saved_s + SHARE * (now - self._opened_at))
        self._opened_at = now
        if not is_busy:
            self._saved_s = max(AT_ONCE_S, self._saved_s)
        self._each_s = self._saved_s / max(1, len(self.looks))

    def do(self, parts: InParts[T], tenant: str, is_wanted: Callable[[], bool]) -> Generator[None, None, T]:
        """Do all parts; returns their result. Yields when a gap is over, or when the device has to finish a part first.
        Raises `WrongState` once `is_wanted` says no.
        """
        self.looks[tenant] += 1
        left_s = 0.0
        try:
            while is_wanted():
                left_s = min(left_s, 0.0) + max(0.0, min(self._each_s / self.looks[tenant], self._saved_s))
                while left_s > 0:
                    began = time.perf_counter()
                    try:
                        wait = next(parts)
                        if wait is not None and self._is_busy:
                            break
                        if wait is not None:
                            wait()
                    except StopIteration as end:
                        found: T = end.value
                        return found
                    finally:
                        took_s = time.perf_counter() - began
                        left_s -= took_s
                        self._saved_s -= took_s
                yield
        finally:
            self.looks -= Counter([tenant])
        raise WrongState("the session or its map has been closed meanwhile")


class Whitebox:
    """Reads activations through the model, keeps account of their room, and reinstates turns of other engines."""

    def __init__(
        self, placement: Placement, runner: Runner, match: Match, activations: ActivationRoom, num_layers: int
    ) -> None:
        self._placement = placement
        self._runner = runner
        self._match = match
        self._activations = activations
        self._num_layers = num_layers
        self.gaps = Gaps()

    @property
    def handlers(self) -> Mapping[type[messages.Command], Handler]:
        """What carries out each command. All raise DjinnError if the session's state does not allow it."""
        return {
            messages.Arm: self._arm,
            messages.Disarm: disarm,
            messages.ReadCaptures: read_captures,
            messages.ReadKept: read_kept,
            messages.ClearCaptures: self._clear_captures,
            messages.PoolCaptures: self._pool_captures,
            messages.ReadCheckpoint: read_activation,
            messages.EditCheckpoint: self._edit_checkpoint,
            messages.WriteCheckpoint: self._write_checkpoint,
            messages.Lens: self._lens,
            messages.ReadPaused: read_paused,
            messages.Reinstate: self._reinstate,
            messages.MapLens: self._map_lens,
            messages.CloseMap: close_map,
            messages.ReadNorms: read_norms,
            messages.ReadFeatures: self._read_features,
            messages.Attribute: self._read_attribution,
        }

    def enter(self, sequence: TokenSequence, above: messages.Above) -> Checkpoint:
        """Where a pass begins that leaves out layers, as if it had paused there. Raises `ActivationsFull`."""
        self._activations.check(sequence, len(above.hidden.data))
        hidden, rows = self._runner.store(above.hidden), above.hidden.shape[0]
        return Checkpoint(above.layer, above.first, rows, hidden, Pass.PREFILL, None, time.time())

    def _lens(self, sequence: TokenSequence, command: messages.Lens) -> Generator[None, None, LensRows]:
        """The most likely tokens at some positions of the checkpoint. Raises `WrongState`, `FieldOutOfRange`."""
        _, checkpoint = _paused(sequence)
        if checkpoint.point not in STREAM:
            raise WrongState(
                f"session {command.session} is paused at {checkpoint.point}, and a lens reads the residual stream: "
                f"pause at {names_of(STREAM)}"
            )
        first, end = _chosen(checkpoint, command.positions)
        token_ids, hidden = tuple(sequence.tokens[first:end]), checkpoint.hidden
        cells = [(checkpoint.layer, at, hidden, at - checkpoint.first) for at in range(first, end)]
        parts = self._runner.look(cells, LensAsk(command.top_k))
        found = yield from self.gaps.do(parts, sequence.tenant, lambda: not sequence.closed)
        return replace(found, first=first, token_ids=token_ids)

    def open_map(
        self, sequence: TokenSequence, command: messages.OpenMap, beside: TokenSequence | None
    ) -> ActivationMap:
        """Hold on to the cells of now until `CloseMap`, to be read in parts between steps, to those after the last
        layer, and to those of a session `beside` it, with which they may be compared. Raises `FieldOutOfRange`.
        """
        cells, found = _map(sequence, command.positions, command.layers, command.point)
        span = Positions(found.first, found.end)
        ends = _map(sequence, span, (self._num_layers - 1,))[0] if found.layers else ()
        apart = None
        if beside is not None:
            kept = kept_rows(beside.captures, beside.checkpoint, command.layers, command.point)
            apart = _newest(kept, found.first, found.end)
        sequence.map = cells, {cell[1]: cell for cell in ends}, apart
        return found

    def _map_lens(self, sequence: TokenSequence, command: messages.MapLens) -> Generator[None, None, LensRows]:
        """The same for the session's map. Raises `WrongState` if none is open."""
        cells, ends, beside = _open_map(sequence)
        return self._while_open(sequence, self._runner.look(cells, command.ask, ends, beside))

    def _read_features(
        self, sequence: TokenSequence, command: messages.ReadFeatures
    ) -> Generator[None, None, FeatureRows]:
        """What a dictionary makes of the session's map. Raises `WrongState` if none is open, `NotFound`."""
        return self._while_open(sequence, self._runner.features(_open_map(sequence)[0], command))

    def _while_open(self, sequence: TokenSequence, parts: InParts[T]) -> Generator[None, None, T]:
        """A look at the session's map, which ends with it."""
        cells = sequence.map
        return self.gaps.do(parts, sequence.tenant, lambda: sequence.map is cells and not sequence.closed)

    def _read_attribution(
        self, sequence: TokenSequence, command: messages.Attribute
    ) -> Generator[None, None, Attribution]:
        """What is kept at one position as parts of a difference of logits. Until it is told, that is the session's map.
        Raises `FieldOutOfRange`.
        """
        last = self._num_layers - 1
        cells, _ = _map(sequence, command.positions, (last,))
        if len(cells) != 1:
            raise FieldOutOfRange(
                f"positions: one position at which the stream after layer {last} is kept, not {len(cells)}",
                param="positions",
            )
        at = Positions(cells[0][1], cells[0][1] + 1)
        kept = [(cell, point) for point in ADDED for cell in _map(sequence, at, None, point)[0]]
        kept.sort(key=lambda each: place_of(each[0][0], each[1]))
        streams = [point is Point.RESID_POST for _, point in kept]
        units = [(cell, point, sequence.adapter) for point in WRITING for cell in _map(sequence, at, None, point)[0]]
        units.sort(key=lambda each: place_of(each[0][0], each[1]))
        cells = [cell for cell, _ in kept]
        sequence.map = cells, {}, None
        work = self._runner.attribute(cells, streams, units, command)
        values, total, found = yield from self._while_open(sequence, work)
        parts = tuple((cell[0], point, value) for (cell, point), value in zip(kept, values, strict=True))
        inner = tuple((cell[0], point, each) for (cell, point, _), each in zip(units, found, strict=True))
        return Attribution(at.first, parts, total, inner)

    def _pool_captures(self, sequence: TokenSequence, command: messages.PoolCaptures) -> Callable[[], TensorData]:
        """A function for any thread that gives the mean of all that has been captured. Raises `ActivationsFull` if some
        of it found no room.
        """
        return self._runner.mean(_all_captured([sequence]), command.normed)

    def read_logits(self, sequences: Iterable[TokenSequence], token_ids: tuple[int, ...] | None) -> object:
        """What the final norm and the head make of all that has been captured. Raises `ActivationsFull` as above."""
        return self._runner.logits(_all_captured(sequences), token_ids)

    def _arm(self, sequence: TokenSequence, command: messages.Arm) -> None:
        """Add a breakpoint. Raises `WrongState` if it would pause a turn that must not, `UploadMissing`."""
        turn = sequence.turn
        cannot_pause = turn is not None and not turn.paused and not turn.pausable
        if command.breakpoint.may_pause and cannot_pause:
            raise WrongState(f"session {command.session} is running a turn of an API that cannot report a pause")
        self._runner.uploads.require(command.breakpoint.needs)
        sequence.breakpoints[command.breakpoint.id] = command.breakpoint
        sequence.fast_path_until = 0

    def require_uploads(self, sequence: TokenSequence) -> None:
        """Raise `UploadMissing` unless all is loaded that turns of the session need."""
        if sequence.watched:
            self._runner.uploads.require(_needed(sequence))

    def drop_upload(self, digest: str, sequences: Iterable[TokenSequence]) -> None:
        """Forget an upload. Raises `UploadInUse` while one of these needs it."""
        if any(need.digest == digest for each in sequences if each.watched for need in _needed(each)):
            raise UploadInUse(
                "a session has a breakpoint that needs it, or its history was edited through it: remove the "
                "breakpoint, and rewind or close the session"
            )
        self._runner.uploads.drop(digest)

    def load_upload(self, path: str, digest: str) -> None:
        """Take a file that the server has written. Raises `NotFound`, `UploadsFull`."""
        self._runner.uploads.load(Path(path), digest)

    def _clear_captures(self, sequence: TokenSequence, command: messages.ClearCaptures) -> None:
        """Forget what has been captured."""
        sequence.captures.clear()
        self._activations.note(sequence)

    def _reinstate(self, sequence: TokenSequence, command: messages.Reinstate) -> None:
        """Give a session that has just been imported what it had when it was exported. Raises `FieldOutOfRange` if what
        the turn has generated does not match its grammar, `ActivationsFull`, `UploadMissing`.
        """
        wanted: list[Breakpoint | Edit] = [*command.breakpoints, *(each.edit for each in command.interventions)]
        wanted += [] if command.paused is None else [each.edit for each in command.paused.interventions]
        self._runner.uploads.require(set[Need]().union(*(each.needs for each in wanted)))
        paused, matcher = command.paused, None
        if paused is not None:
            self._activations.check(sequence, len(paused.hidden.data))
            if paused.sampling.grammar is not None:
                matcher = self._match(paused.sampling.grammar, sequence.tokens[paused.prompt_tokens :])
        sequence.breakpoints = {each.id: each for each in command.breakpoints}
        sequence.interventions = InterventionLog(command.interventions)
        sequence.assume_computed()
        if paused is None or command.turn is None:
            return
        info = paused.checkpoint
        self._placement.cut(sequence, info.first)
        sequence.interventions = InterventionLog(paused.interventions)
        sequence.reached = info.first
        sequence.turn = TurnState(
            command.turn,
            paused.sampling,
            paused.stop,
            paused.prompt_tokens,
            kept=paused.prompt_tokens,
            interventions=command.interventions,
            matcher=matcher,
            paused=True,
            cached_tokens=paused.cached_tokens,
            tokens_recomputed=paused.tokens_recomputed,
        )
        sequence.checkpoint = Checkpoint(
            info.layer + (info.point is Point.RESID_POST),
            info.first,
            info.end - info.first,
            self._runner.store(paused.hidden),
            info.in_pass,
            info.breakpoint,
            info.created_at,
            info.point,
            held=False,
        )
        self._activations.note(sequence)

    def _edit_checkpoint(self, sequence: TokenSequence, command: messages.EditCheckpoint) -> None:
        """Apply all edits, or none, and note them for a recomputation. Raises `WrongState`, `FieldOutOfRange`."""
        (_, checkpoint), log, edits = _paused(sequence), sequence.interventions, command.edits
        self._runner.uploads.require(set[Need]().union(*(each.needs for each in edits)))
        log.check_pass("edits", checkpoint.first, checkpoint.end, more=len(edits))
        tensors = {tensor for edit in edits for tensor in edit.tensors}
        log.check("edits", more=len(edits), more_bytes=sum(len(each.data) for each in tensors))
        hidden, made, get = checkpoint.hidden, [], self._runner.uploads.get
        for index, edit in enumerate(edits):
            first, end = _chosen(checkpoint, edit.positions, param=f"edits.{index}.positions")
            hidden = hidden.edited(first - checkpoint.first, end - checkpoint.first, edit, get)
            made.append(_at_checkpoint(checkpoint, first, end, edit))
        if not hidden.is_finite():
            raise FieldOutOfRange("the edits lead to values that are not finite numbers", param="edits")
        checkpoint.hidden = hidden
        for each in made:
            log.add(each)

    def _write_checkpoint(self, sequence: TokenSequence, command: messages.WriteCheckpoint) -> None:
        """Put a client's activation in the checkpoint's place, and note it. Raises `WrongState`, `FieldOutOfRange`."""
        (_, checkpoint), log, tensor = _paused(sequence), sequence.interventions, command.tensor
        if (tensor.dtype, tensor.shape) != (checkpoint.hidden.dtype, checkpoint.hidden.shape):
            raise FieldOutOfRange(
                f"the activation must be {checkpoint.hidden.dtype} {list(checkpoint.hidden.shape)}, "
                f"not {tensor.dtype} {list(tensor.shape)}",
                param="activation",
            )
        log.check_pass("activation", checkpoint.first, checkpoint.end, more=1)
        log.check("activation", more=1, more_bytes=len(tensor.data))
        log.forget(checkpoint.place, checkpoint.first, checkpoint.end)
        edit = Edit(EditOp.REPLACE, vector=tensor)
        checkpoint.hidden = checkpoint.hidden.edited(0, checkpoint.length, edit, self._runner.uploads.get)
        log.add(_at_checkpoint(checkpoint, checkpoint.first, checkpoint.end, edit))


def _all_captured(sequences: Iterable[TokenSequence]) -> list[Rows]:
    """All rows. Raises `ActivationsFull` if some found no room, or a session has none."""
    rows = list[Rows]()
    for captures in (sequence.captures for sequence in sequences):
        if captures.dropped or not captures.records:
            raise ActivationsFull("captures have no room in max_activation_bytes now", retry_after_s=1)
        rows += [(each.hidden, 0, len(each.positions)) for each in captures.records if each.point is Point.RESID_POST]
    return rows


def _needed(sequence: TokenSequence) -> set[Need]:
    """The uploads that its breakpoints need, and its history, if its KV is lost."""
    turn = sequence.turn
    made = [*sequence.interventions.snapshot(), *(turn.interventions if turn is not None else ())]
    return set[Need]().union(
        *(each.needs for each in sequence.breakpoints.values()), *(each.edit.needs for each in made)
    )


def disarm(sequence: TokenSequence, command: messages.Disarm) -> None:
    """Take one breakpoint away, or all; one that is gone already is no error."""
    if command.breakpoint is None:
        sequence.breakpoints.clear()
    else:
        sequence.breakpoints.pop(command.breakpoint, None)


def read_captures(sequence: TokenSequence, command: messages.ReadCaptures) -> Callable[[], Captures]:
    """A function for any thread that returns the present captures. It waits until they are copied to the host."""
    wanted, dropped = (command.point, command.layer), sequence.captures.dropped
    captured = tuple(
        each
        for each in sequence.captures.records
        if all(asked in (None, found) for asked, found in zip(wanted, (each.point, each.layer), strict=True))
    )

    def give(each: Captured) -> Capture:
        tensor = replace(each.hidden.view(), shape=(len(each.positions), *each.shape))
        return Capture(each.breakpoint, each.layer, each.positions, each.token_ids, tensor, each.point, each.heads)

    return lambda: Captures(tuple(map(give, captured)), dropped)


def read_kept(sequence: TokenSequence, command: messages.ReadKept) -> Callable[[], Activation]:
    """A function for any thread that copies what is kept of a point now. Raises `FieldOutOfRange`."""
    kept = kept_rows(sequence.captures, sequence.checkpoint, (command.layer,), command.point)
    found = {position: cell for (_, position), cell in _newest(kept, 0, sys.maxsize).items()}
    positions = _kept_positions(sequence, command, sorted(found))
    pieces = join_cells(found[position] for position in positions)

    def copy() -> Activation:
        parts = [hidden.read(first, end) for hidden, first, end in pieces]
        shape = (len(positions), parts[0].shape[1])
        tensor = replace(parts[0], shape=shape, data=b"".join(part.data for part in parts))
        return Activation(command.layer, positions[0], positions[-1] + 1, tensor, command.point)

    return copy


def _kept_positions(sequence: TokenSequence, command: messages.ReadKept, kept: list[int]) -> list[int]:
    """Those that the command wants of what is `kept`."""
    wanted, where = command.positions, f"{command.point} of layer {command.layer}"
    if not kept:
        raise FieldOutOfRange(
            f"positions: session {sequence.session} keeps nothing of {where}: capture it there first, with all heads",
            param="positions",
        )
    if wanted.last:
        return kept[-1:]
    first, end = (kept[0], kept[-1] + 1) if wanted.end is None else (wanted.first, wanted.end)
    chosen = kept[bisect_left(kept, first) : bisect_left(kept, end)]
    if len(chosen) < end - first:
        missing = next(at for at, position in enumerate([*chosen, -1], first) if position != at)
        shown = ", ".join(f"{run.first}:{run.end}" for run in runs_of(kept)[:10] if run.step == 1) or "others"
        raise FieldOutOfRange(
            f"positions: session {sequence.session} does not keep position {missing} of {where}, but {shown}",
            param="positions",
        )
    return chosen


def _paused(sequence: TokenSequence) -> tuple[TurnState, Checkpoint]:
    """Its paused turn, and where that has stopped. Raises `WrongState` if it has none."""
    turn, checkpoint = sequence.turn, sequence.checkpoint
    if turn is None or checkpoint is None or not turn.paused:
        raise WrongState(f"session {sequence.session} is not paused: there is no checkpoint")
    return turn, checkpoint


def _chosen(checkpoint: Checkpoint, positions: Positions, *, param: str = "positions") -> Span:
    """What `positions` chooses; `last` is the checkpoint's last position. Raises `FieldOutOfRange` with `param`."""
    first, end = checkpoint.first, checkpoint.end
    if positions.last:
        return end - 1, end
    chosen = max(first, positions.first), end if positions.end is None else min(end, positions.end)
    wanted = positions.first, positions.end
    if chosen[0] >= chosen[1] or (positions.end is not None and chosen != wanted):
        raise FieldOutOfRange(f"{param} must be within {first}:{end}, the positions of the checkpoint", param=param)
    return chosen


def read_activation(sequence: TokenSequence, command: messages.ReadCheckpoint) -> Activation:
    """The residual stream at some positions of the checkpoint. Raises `WrongState`, `FieldOutOfRange`."""
    _, checkpoint = _paused(sequence)
    first, end = _chosen(checkpoint, command.positions)
    tensor = checkpoint.hidden.read(first - checkpoint.first, end - checkpoint.first)
    return Activation(checkpoint.layer, first, end, tensor, checkpoint.point)


def read_paused(sequence: TokenSequence, command: messages.ReadPaused) -> PausedTurn:
    """Everything that another engine needs to go on with the turn. Raises `WrongState`."""
    turn, checkpoint = _paused(sequence)
    return PausedTurn(
        turn.sampling,
        turn.stop,
        turn.prompt_tokens,
        checkpoint.info(),
        checkpoint.hidden.read(0, checkpoint.length),
        sequence.interventions.snapshot(),
        turn.cached_tokens or 0,
        turn.tokens_recomputed,
    )


def _at_checkpoint(checkpoint: Checkpoint, first: int, end: int, edit: Edit) -> Intervention:
    return Intervention(first, end, checkpoint.layer + 1, edit, point=checkpoint.point)


def _open_map(sequence: TokenSequence) -> CellMap:
    """The session's map. Raises `WrongState` if none is open."""
    if sequence.map is None:
        raise WrongState(f"session {sequence.session} has no map open")
    return sequence.map


def close_map(sequence: TokenSequence, command: messages.CloseMap) -> None:
    """Let go of the map, if one is open."""
    sequence.map = None


def read_norms(sequence: TokenSequence, command: messages.ReadNorms) -> Callable[[], ActivationNorms]:
    """A function for any thread that measures the residual streams of now. Raises `FieldOutOfRange`."""
    return partial(_measure, *_map(sequence, command.positions, command.layers), command.vector)


def _map(
    sequence: TokenSequence,
    positions: Positions,
    layers: tuple[int, ...] | None,
    point: Point = Point.RESID_POST,
) -> tuple[list[Cell], ActivationMap]:
    """The cells of these layers and positions, by layer and position, and what a client sees of their places."""
    kept = kept_rows(sequence.captures, sequence.checkpoint, layers, point)
    extent = min((at[0] for _, at, _ in kept), default=0), max((at[-1] + 1 for _, at, _ in kept), default=0)
    first, end = _span_of_map(positions, extent, len(sequence.tokens))
    found = _newest(kept, first, end)
    cells = [found[place] for place in sorted(found)]
    by_layer = groupby(cells, key=itemgetter(0))
    places = tuple(MapLayer(layer, tuple(position for _, position, *_ in some)) for layer, some in by_layer)
    return cells, ActivationMap(first, end, *extent, tuple(sequence.tokens[first:end]), places)


def _newest(kept: Iterable[KeptRows], first: int, end: int) -> dict[tuple[int, int], Cell]:
    """By layer and position, the newest cell of each position in `[first, end)`."""
    return {
        (layer, at[row]): (layer, at[row], hidden, row)
        for layer, at, hidden in kept  # the newest last: it takes the place of those before
        for row in range(bisect_left(at, first), bisect_left(at, end))
    }


def _span_of_map(positions: Positions, kept: Span, length: int) -> Span:
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
    by_layer = [join_cells(layer) for _, layer in groupby(cells, key=itemgetter(0))]
    norms = tuple(tuple(n for stored, a, b in rows for n in stored.norms(a, b)) for rows in by_layer)
    if vector is None:
        return ActivationNorms(found, norms, None)
    cosines = tuple(tuple(c for stored, a, b in rows for c in stored.cosines(a, b, vector)) for rows in by_layer)
    return ActivationNorms(found, norms, cosines)
