"""Fingerprints of the edits that blocks of KV were computed with: equal ones for the same edits at the same places."""

import hashlib
from collections.abc import Iterable

from app.domain.breakpoints import Intervention
from app.domain.positions import Runs, clip_runs, positions_of, runs_of


class Fingerprints:
    """Fingerprints of a log that stays as it is. Neighbouring blocks mostly have the same edits at the same places of
    the block, and then the same fingerprint.
    """

    def __init__(self, entries: Iterable[tuple[Intervention, bytes]]) -> None:
        """Of edits and their digests, in the order in which they were made."""
        self._entries = sorted(entries, key=lambda entry: entry[0].boundary)  # stable
        self._shapes: dict[Runs, int] = {}
        self._shape_of = [self._shapes.setdefault(made.runs, len(self._shapes)) for made, _ in self._entries]
        self._rows = [made for made, _ in self._entries if made.has_rows]
        self._made: dict[tuple[Runs, ...], bytes] = {}

    def make(self, first: int, end: int) -> bytes:
        """See `InterventionLog.fingerprint`."""
        places = tuple(_place(runs, first, end) for runs in self._shapes)
        if not any(places):
            return b""
        if any(made.first < end and first < made.end for made in self._rows):
            return self._digest(places, first, end)
        if places not in self._made:
            self._made[places] = self._digest(places, first, end)
        return self._made[places]

    def _digest(self, places: tuple[Runs, ...], first: int, end: int) -> bytes:
        state = hashlib.blake2b(digest_size=16)
        for (made, digest), shape in zip(self._entries, self._shape_of, strict=True):
            place = places[shape]
            if not place:
                continue
            part = made.clip(first, end) if made.has_rows else None
            done = digest if part is None else part.edit.digest()
            state.update(repr((*map(tuple, place), made.boundary)).encode() + done)
        return state.digest()


def _place(runs: Runs, first: int, end: int) -> Runs:
    """What lies in `[first, end)`, counted from `first`: the same runs for the same positions."""
    inside = clip_runs(runs, first, end)
    if len(inside) > 1:
        inside = runs_of(positions_of(inside))
    return tuple(run._replace(first=run.first - first, end=run.end - first) for run in inside)
