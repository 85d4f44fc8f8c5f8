"""The edits that a session's KV was computed with. With them KV is recomputed, and never serves a session without them.

The log has an entry for each edit at one place, with the positions where it was made. The hash of a block
covers a fingerprint of the edits in it. Most sessions have no edits, and cost nothing.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace

from app.domain.breakpoints import MAX_INTERVENTION_BYTES, MAX_INTERVENTIONS, MAX_PASS_EDITS, Intervention, TensorData
from app.domain.errors import FieldOutOfRange
from app.domain.points import Place, Point
from app.domain.positions import Runs, clip_runs, join, positions_of, runs_of

MAX_RUNS = 256
"""Of one entry. Each turn writes the entries that it has changed to the journal, so none may grow without end."""


class InterventionLog:
    """Edits in the order in which they were made. What is looked up in them is indexed when it is first needed."""

    end: int
    """The position after the last that has an edit."""
    tensor_bytes: int
    """Of all vectors, each counted once, and of all written activations."""
    _runs: int
    """Of all edits together."""

    def __init__(self, made: Iterable[Intervention] = ()) -> None:
        """The log whose `snapshot` is `made`: with the same entries it has the same fingerprints."""
        self._continuations: _Continuations | None = None
        self._prints: _Fingerprints | None = None
        self.changes = 0
        """How often it has changed."""
        self._set(made)

    def __len__(self) -> int:
        return len(self._entries)

    def snapshot(self) -> tuple[Intervention, ...]:
        """All of them."""
        return tuple(self._entries)

    def copy(self) -> InterventionLog:
        """Another log with the same edits."""
        log = InterventionLog()
        log._entries, log._prints = list(self._entries), self._prints
        log.end, log._runs, log._vectors, log.tensor_bytes = self.end, self._runs, set(self._vectors), self.tensor_bytes
        return log

    def check(self, param: str, *, more: int = 0, more_bytes: int = 0) -> None:
        """Raise `FieldOutOfRange` for `param` if the session has too many edits, or would with `more`."""
        count, tensor_bytes = self._runs + more, self.tensor_bytes + more_bytes
        if count > MAX_INTERVENTIONS:
            raise FieldOutOfRange(
                f"{param}: the session's history would be computed with {count} edits, counted at each layer and each "
                f"run of evenly spaced positions; it must be from 0 to {MAX_INTERVENTIONS}: let fewer "
                "positions meet them, or go on from an earlier token",
                param=param,
            )
        if tensor_bytes > MAX_INTERVENTION_BYTES:
            raise FieldOutOfRange(
                f"{param}: the vectors and written activations of the session's edits would have {tensor_bytes} bytes, "
                f"which are kept in case its KV is lost; the number must be from 0 to {MAX_INTERVENTION_BYTES}",
                param=param,
            )

    def check_pass(self, param: str, first: int, end: int, *, more: int = 0) -> None:
        """Raise `FieldOutOfRange` for `param` if the pass over `[first, end)` has too many edits, or would with `more`:
        one step makes all of them again if the KV is lost.
        """
        count = len(self.within(first, end)) + more
        if count > MAX_PASS_EDITS:
            raise FieldOutOfRange(
                f"{param}: the pass over {first}:{end} would be computed with {count} edits, counted at each layer; it "
                f"must be from 0 to {MAX_PASS_EDITS}: go on to the next pass with fewer",
                param=param,
            )

    def add(self, made: Intervention) -> None:
        """Note an edit. It becomes part of an entry for the same edit, if it can."""
        if self._continuations is None:
            self._continuations = _Continuations(self._entries)
        number = self._continuations.find(made)
        if number is None:
            number, edit = len(self._entries), made.edit.everywhere()
            self._entries.append(made if edit is made.edit else replace(made, edit=edit))
            self._count(made)
        else:
            before = self._entries[number]
            runs = join(before.runs, made.runs)
            self._entries[number] = Intervention.at(runs, made.boundary, before.edit, made.point)
            self._runs += len(runs) - len(before.runs)
        self._continuations.note(number, made)
        self.end = max(self.end, made.end)
        self._prints = None
        self.changes += 1

    def forget(self, place: Place, first: int, end: int) -> None:
        """Drop the edits of this place that concern only positions `[first, end)`: all of them are replaced."""
        self._set(e for e in self._entries if e.place != place or e.first < first or end < e.end)
        self.changes += 1

    def within(self, first: int, end: int) -> list[Intervention]:
        """The parts of all edits that concern positions `[first, end)`."""
        near = (made for made in self._entries if made.end > first and made.first < end)
        return [part for made in near if (part := made.clip(first, end)) is not None]

    def truncate(self, length: int) -> None:
        """Forget what concerns positions from `length` on."""
        if self.end > length:
            self._set(self.within(0, length))
            self.changes += 1

    def until(self, length: int) -> InterventionLog:
        """Another log with what concerns the positions before `length`."""
        log = self.copy()
        log.truncate(length)
        return log

    def fingerprint(self, first: int, end: int) -> bytes:
        """Differs for KV of positions `[first, end)` that was computed with other edits; empty if there were none."""
        if self._prints is None:
            self._prints = _Fingerprints(self._entries)
        return self._prints.find(first, end)

    def _set(self, entries: Iterable[Intervention]) -> None:
        self._entries = list(entries)
        self._continuations = self._prints = None
        self.end = max((made.end for made in self._entries), default=0)
        self._runs = self.tensor_bytes = 0
        self._vectors = set[TensorData]()
        for made in self._entries:
            self._count(made)

    def _count(self, made: Intervention) -> None:
        """Count one more entry."""
        self._runs += len(made.only) or 1
        for tensor in made.edit.tensors:
            if len(tensor.shape) == 2 or tensor not in self._vectors:
                self.tensor_bytes += len(tensor.data)
                if len(tensor.shape) == 1:
                    self._vectors.add(tensor)


class _Continuations:
    """Finds the entry that an edit goes on in: so an edit of every token is a single entry.

    Only edits at one place and one position have an order. An edit may become part of an equal entry if neither
    that one nor any after it reaches past where the edit begins. It takes the first such entry: so equal edits of a
    breakpoint, which are made again at every position, find one entry each.
    """

    def __init__(self, entries: Sequence[Intervention]) -> None:
        """For a log that has these. `note` tells of each that it gets or changes."""
        self._entries = entries
        self._equal: dict[tuple[Place, bytes], list[int]] = {}
        """The numbers of equal entries, by place and edit."""
        self._reach: dict[Place, list[tuple[int, int]]] = {}
        """By place, numbers and ends of the entries that reach past all later ones: mostly one."""
        for number, made in enumerate(entries):
            self.note(number, made)

    def find(self, made: Intervention) -> int | None:
        """The number of the entry that goes on with `made`; None: it is a new one."""
        if made.edit.has_rows:
            return None
        equal, after = self._equal.get((made.place, made.edit.digest()), []), -1
        for number, end in self._reach.get(made.place, ()):
            if end > made.first:
                after = number
        for number in equal[bisect_right(equal, after) :]:
            if len(self._entries[number].only) < MAX_RUNS:
                return number
        return None

    def note(self, number: int, made: Intervention) -> None:
        """Entry `number` ends with `made` now."""
        equal = self._equal.setdefault((made.place, made.edit.digest()), [])
        if not equal or equal[-1] < number:
            equal.append(number)
        reach = [(other, end) for other, end in self._reach.get(made.place, ()) if other > number or end > made.end]
        place = bisect_right(reach, (number, made.end))
        if place == len(reach) or reach[place][1] < made.end:
            reach.insert(place, (number, made.end))
        self._reach[made.place] = reach


class _Fingerprints:
    """Fingerprints of a log that stays as it is.

    Neighbouring blocks mostly have the same edits at the same places of the block, and then one digest serves them.
    Blocks are mostly looked up in rising order: edits that end before one are not looked at again.
    """

    def __init__(self, entries: Sequence[Intervention]) -> None:
        groups: dict[Runs, list[tuple[Place, int, Intervention]]] = {}
        for number, made in enumerate(entries):
            groups.setdefault(made.runs, []).append((made.place, number, made))
        self._groups = sorted(groups.items(), key=lambda group: group[0][0].first)
        """Edits of the same positions, each with its place and its number in the log."""
        self._has_rows = [any(made.edit.has_rows for _, _, made in edits) for _, edits in self._groups]
        self._asked_from = self._next = 0
        self._near: list[int] = []
        """Of the groups before `_next`, those that end after `_asked_from`."""
        self._found: dict[tuple[int, int], bytes] = {}
        self._digests: dict[tuple[tuple[int, Runs], ...], bytes] = {}

    def find(self, first: int, end: int) -> bytes:
        """The fingerprint of positions `[first, end)`."""
        known = self._found.get((first, end))
        if known is None:
            known = self._found[first, end] = self._make(first, end)
        return known

    def _make(self, first: int, end: int) -> bytes:
        places = tuple(
            (group, place) for group in self._near_groups(first, end) if (place := self._place(group, first, end))
        )
        if not places:
            return b""
        if any(self._has_rows[group] for group, _ in places):
            return self._digest(places, first, end)
        if places not in self._digests:
            self._digests[places] = self._digest(places, first, end)
        return self._digests[places]

    def _near_groups(self, first: int, end: int) -> list[int]:
        """Groups that may have a position in `[first, end)`."""
        if first < self._asked_from:
            self._next, self._near = 0, []
        self._asked_from = first
        while self._next < len(self._groups) and self._groups[self._next][0][0].first < end:
            self._near.append(self._next)
            self._next += 1
        self._near = [group for group in self._near if self._groups[group][0][-1].end > first]
        return self._near

    def _place(self, group: int, first: int, end: int) -> Runs:
        """The group's positions in `[first, end)`, counted from `first`: the same runs for the same positions."""
        inside = clip_runs(self._groups[group][0], first, end)
        if len(inside) > 1:
            inside = runs_of(positions_of(inside))
        return tuple(run._replace(first=run.first - first, end=run.end - first) for run in inside)

    def _digest(self, places: tuple[tuple[int, Runs], ...], first: int, end: int) -> bytes:
        """Of points, positions and edits, by place and then in the order of the log."""
        edits = [(*edit, place) for group, place in places for edit in self._groups[group][1]]
        edits.sort(key=lambda edit: edit[:2])
        state = hashlib.blake2b(digest_size=16)
        for (boundary, _), _, made, place in edits:
            part = made.clip(first, end) if made.edit.has_rows else made
            assert part is not None
            # Between layers there was nothing else once, and disks may have KV of that time.
            point = () if made.point is Point.RESID_POST else (made.point.value,)
            state.update(repr((*map(tuple, place), boundary, *point)).encode() + part.edit.digest())
        return state.digest()
