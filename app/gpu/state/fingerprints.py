"""Fingerprints of the edits that blocks of KV were computed with: equal ones for the same edits at the same places."""

import hashlib
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from app.domain.positions import Runs, clip_runs, next_position, positions_of, runs_of
from app.gpu.state.continuations import Entry

Numbered = tuple[int, int, Entry]
"""Boundary, number in the log, entry: they are digested in this order."""


class Fingerprints:
    """Fingerprints of a log that stays as it is. Neighbouring blocks mostly have the same edits at the same places of
    the block, and then the same fingerprint. What is asked for rises, and then only edits in the block are looked at.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        """Of edits in the order in which they were made."""
        shapes: dict[tuple[int, int, Runs], list[Numbered]] = {}
        for number, entry in enumerate(entries):
            made = entry.made
            shapes.setdefault((made.first, made.end, made.only), []).append((made.boundary, number, entry))
        self._shapes = list(shapes.values())
        """Edits of the same positions, together."""
        self._with_rows = {
            shape for shape, edits in enumerate(self._shapes) if any(entry.made.has_rows for _, _, entry in edits)
        }
        self._ahead: list[tuple[int, int]] = []
        """A heap of the next position of each shape, and the shape."""
        self._asked_to = -1
        """Up to which position; -1: nothing has been asked for yet."""
        self._found: dict[tuple[int, int], bytes] = {}
        self._made: dict[tuple[tuple[int, Runs], ...], bytes] = {}

    def make(self, first: int, end: int) -> bytes:
        """See `InterventionLog.fingerprint`."""
        known = self._found.get((first, end))
        if known is None:
            known = self._found[first, end] = self._make(first, end)
        return known

    def _make(self, first: int, end: int) -> bytes:
        shapes = self._shapes_in(first, end)
        if not shapes:
            return b""
        places = tuple((shape, _place(self._runs(shape), first, end)) for shape in shapes)
        if not self._with_rows.isdisjoint(shapes):
            return self._digest(places, first, end)
        if places not in self._made:
            self._made[places] = self._digest(places, first, end)
        return self._made[places]

    def _shapes_in(self, first: int, end: int) -> list[int]:
        """Those with a position in `[first, end)`, rising."""
        if not 0 <= self._asked_to <= first:
            self._ahead = [(entries[0][2].made.first, shape) for shape, entries in enumerate(self._shapes)]
            heapify(self._ahead)
        self._asked_to = end
        found = []
        while self._ahead and self._ahead[0][0] < end:
            shape = self._ahead[0][1]
            runs = self._runs(shape)
            inside, after = next_position(runs, first), next_position(runs, end)
            if inside is not None and inside < end:
                found.append(shape)
            if after is None:
                heappop(self._ahead)
            else:
                heapreplace(self._ahead, (after, shape))
        return sorted(found)

    def _runs(self, shape: int) -> Runs:
        return self._shapes[shape][0][2].made.runs

    def _digest(self, places: tuple[tuple[int, Runs], ...], first: int, end: int) -> bytes:
        edits = [
            (boundary, number, place, entry.digest if shape not in self._with_rows else _done(entry, first, end))
            for place, (shape, _) in enumerate(places)
            for boundary, number, entry in self._shapes[shape]
        ]
        edits.sort()  # no two have one number
        texts = dict[tuple[int, int], bytes]()
        parts = list[bytes]()
        for boundary, _, place, done in edits:
            text = texts.get((place, boundary))
            if text is None:
                text = repr((*map(tuple, places[place][1]), boundary)).encode()
                texts[place, boundary] = text
            parts += text, done
        return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


def _done(entry: Entry, first: int, end: int) -> bytes:
    """The digest of what the edit does in `[first, end)`."""
    part = entry.made.clip(first, end) if entry.made.has_rows else None
    return entry.digest if part is None else part.edit.digest()


def _place(runs: Runs, first: int, end: int) -> Runs:
    """What lies in `[first, end)`, counted from `first`: the same runs for the same positions."""
    inside = clip_runs(runs, first, end)
    if len(inside) > 1:
        inside = runs_of(positions_of(inside))
    return tuple(run._replace(first=run.first - first, end=run.end - first) for run in inside)
