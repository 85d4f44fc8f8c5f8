"""The edits that a session's KV was computed with, by position. With them KV is computed again, and kept apart from KV
that was computed with other edits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from app.domain.breakpoint_work import MAX_PASS_EDITS, MAX_WORK
from app.domain.breakpoints import MAX_INTERVENTION_BYTES, MAX_INTERVENTIONS, Intervention, TensorData
from app.domain.errors import FieldOutOfRange
from app.domain.positions import join
from app.gpu.state.fingerprints import Fingerprints

MAX_RUNS = 256
"""Of one entry. Each turn writes to the journal what it has changed, and an entry that grew for ever would be that."""


@dataclass(slots=True)
class _Entry:
    intervention: Intervention
    digest: bytes


class InterventionLog:
    """Edits by position, in the order in which they were made. Most sessions have none, and cost nothing."""

    def __init__(self, made: Iterable[Intervention] = ()) -> None:
        self._entries: list[_Entry] = []
        self._at: dict[int, list[_Entry]] = {}
        """The same by boundary."""
        self._last: dict[tuple[int, bytes], int] = {}
        """By boundary and digest: which of those is the last."""
        self._ends: dict[int, int] = {}
        """By boundary: the position after the last that has an edit there."""
        self._tensors: dict[TensorData, int] = {}
        """How many edits have each."""
        self.tensor_bytes = 0
        """Of all tensors, each counted once."""
        self._runs = 0
        """Of all edits together."""
        self._prints: Fingerprints | None = None
        for intervention in made:
            self.add(intervention)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def end(self) -> int:
        """The position after the last that has an edit."""
        return max(self._ends.values(), default=0)

    def snapshot(self) -> tuple[Intervention, ...]:
        """All of them."""
        return tuple(entry.intervention for entry in self._entries)

    def copy(self) -> InterventionLog:
        """A log of its own with the same edits."""
        log = InterventionLog()
        for entry in self._entries:
            log._append(entry.intervention, entry.digest)
        return log

    def check(self, param: str, *, more: int = 0, more_bytes: int = 0) -> None:
        """Raise `FieldOutOfRange` for `param` if the session has too many edits, or would with `more`."""
        count, tensor_bytes = self._runs + more, self.tensor_bytes + more_bytes
        if count > MAX_INTERVENTIONS:
            raise FieldOutOfRange(
                f"{param}: the session's history would be computed with {count} edits, counted at each layer and each "
                f"run of positions that are equally far apart; it must be from 0 to {MAX_INTERVENTIONS}: let fewer "
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
        """Note an edit; one that goes on behind where the same one ended becomes part of it."""
        digest = made.edit.digest()
        before = self._continued(made, digest)
        if before is None:
            self._append(replace(made, edit=made.edit.everywhere()), digest)
            return
        runs = join(before.intervention.runs, made.runs)
        self._runs += len(runs) - len(before.intervention.runs)
        before.intervention = Intervention.at(runs, made.boundary, before.intervention.edit)
        self._ends[made.boundary] = max(made.end, self._ends[made.boundary])
        self._prints = None

    def forget(self, boundary: int, first: int, end: int) -> None:
        """Drop the edits of this boundary that concern only positions `[first, end)`: all of them are replaced."""
        self._keep(i for i in self.snapshot() if not (i.boundary == boundary and first <= i.first and i.end <= end))

    def within(self, first: int, end: int) -> list[Intervention]:
        """The parts of all edits that concern positions `[first, end)`."""
        parts = (entry.intervention.clip(first, end) for entry in self._entries)
        return [part for part in parts if part is not None]

    def truncate(self, length: int) -> None:
        """Forget what concerns positions from `length` on."""
        if self.end > length:
            self._keep(self.within(0, length))

    def fingerprint(self, first: int, end: int) -> bytes:
        """Differs for KV of positions `[first, end)` that was computed with other edits; empty if there were none."""
        if self._prints is None:
            self._prints = Fingerprints((each.intervention, each.digest) for each in self._entries)
        return self._prints.make(first, end)

    def _continued(self, made: Intervention, digest: bytes) -> _Entry | None:
        """The entry behind which the same edit goes on with `made`."""
        if made.has_rows:
            return None
        here = self._at.get(made.boundary, [])
        number = self._last.get((made.boundary, digest))
        if number is None or len(here) - number > MAX_WORK:
            return None
        entry, later = here[number], here[number + 1 :]
        if entry.intervention.end > made.first or len(entry.intervention.only) >= MAX_RUNS:
            return None
        # The order of two edits at one position matters.
        passes = any(_overlap(each.intervention, made) for each in later)
        return None if passes else entry

    def _append(self, made: Intervention, digest: bytes) -> None:
        """Note an edit as one of its own."""
        entry = _Entry(made, digest)
        self._entries.append(entry)
        here = self._at.setdefault(made.boundary, [])
        self._last[made.boundary, digest] = len(here)
        here.append(entry)
        self._ends[made.boundary] = max(made.end, self._ends.get(made.boundary, 0))
        self._runs += len(made.runs)
        self._prints = None
        tensor = made.edit.vector
        if tensor is None:
            return
        if tensor not in self._tensors:
            self.tensor_bytes += len(tensor.data)
        self._tensors[tensor] = self._tensors.get(tensor, 0) + 1

    def _keep(self, kept: Iterable[Intervention]) -> None:
        found = list(kept)
        self._entries, self._at, self._last, self._ends, self._tensors = [], {}, {}, {}, {}
        self.tensor_bytes = self._runs = 0
        for made in found:
            self._append(made, made.edit.digest())


def _overlap(one: Intervention, other: Intervention) -> bool:
    return one.first < other.end and other.first < one.end
