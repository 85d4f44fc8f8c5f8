"""The edits that a session's KV was computed with, by position. With them KV is recomputed, and kept apart from KV
that was computed with other edits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from app.domain.breakpoint_work import MAX_PASS_EDITS
from app.domain.breakpoints import MAX_INTERVENTION_BYTES, MAX_INTERVENTIONS, Intervention, TensorData
from app.domain.errors import FieldOutOfRange
from app.domain.positions import join
from app.gpu.state.continuations import Continuations, Entry
from app.gpu.state.fingerprints import Fingerprints


class InterventionLog:
    """Edits by position, in the order in which they were made. Most sessions have none, and cost nothing.

    A copy shares its entries, and what is looked up in them is found when it is first asked for.
    """

    def __init__(self, made: Iterable[Intervention] = ()) -> None:
        """The log whose `snapshot` is `made`: with the same entries it has the same fingerprints."""
        self._entries = [Entry(each, each.edit.digest()) for each in made]
        self._continuations: Continuations | None = None
        self._prints: Fingerprints | None = None
        self.changes = 0
        """How often it has changed."""
        self.end = 0
        """The position after the last that has an edit."""
        self._runs = 0
        """Of all edits together."""
        self._vectors = set[TensorData]()
        self.tensor_bytes = 0
        """Of all vectors, each counted once, and of all written activations."""
        self._count()

    def __len__(self) -> int:
        return len(self._entries)

    def snapshot(self) -> tuple[Intervention, ...]:
        """All of them."""
        return tuple([entry.made for entry in self._entries])

    def copy(self) -> InterventionLog:
        """A log of its own with the same edits."""
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
        """Note an edit; one that goes on behind where the same one ended becomes part of it."""
        digest = made.edit.digest()
        if self._continuations is None:
            self._continuations = Continuations(self._entries)
        number = self._continuations.find(made, digest)
        if number is None:
            number = len(self._entries)
            edit = made.edit.everywhere()
            self._entries.append(Entry(made if edit is made.edit else replace(made, edit=edit), digest))
            self._runs += len(made.runs)
            self._count_tensor(edit.vector, made.has_rows)
        else:
            before = self._entries[number].made
            runs = join(before.runs, made.runs)
            self._runs += len(runs) - len(before.runs)
            self._entries[number] = Entry(Intervention.at(runs, made.boundary, before.edit), digest)
        self._continuations.note(number, made, digest)
        self.end = max(self.end, made.end)
        self._prints = None
        self.changes += 1

    def forget(self, boundary: int, first: int, end: int) -> None:
        """Drop the edits of this boundary that concern only positions `[first, end)`: all of them are replaced."""
        self._keep(
            entry
            for entry in self._entries
            if not (entry.made.boundary == boundary and first <= entry.made.first and entry.made.end <= end)
        )

    def within(self, first: int, end: int) -> list[Intervention]:
        """The parts of all edits that concern positions `[first, end)`."""
        near = (made for made, _ in self._entries if made.end > first and made.first < end)
        return [part for made in near if (part := made.clip(first, end)) is not None]

    def truncate(self, length: int) -> None:
        """Forget what concerns positions from `length` on."""
        if self.end > length:
            near = (entry for entry in self._entries if entry.made.first < length)
            self._keep(entry if entry.made.end <= length else _cut(entry, length) for entry in near)

    def until(self, length: int) -> InterventionLog:
        """A log of its own with what concerns the positions before `length`."""
        log = self.copy()
        log.truncate(length)
        return log

    def fingerprint(self, first: int, end: int) -> bytes:
        """Differs for KV of positions `[first, end)` that was computed with other edits; empty if there were none."""
        if self._prints is None:
            self._prints = Fingerprints(self._entries)
        return self._prints.make(first, end)

    def _keep(self, kept: Iterable[Entry]) -> None:
        self._entries = list(kept)
        self._continuations = self._prints = None
        self.changes += 1
        self._count()

    def _count(self) -> None:
        made = [entry.made for entry in self._entries]
        self.end = max([each.end for each in made], default=0)
        self._runs = sum([len(each.only) or 1 for each in made])
        tensors = [(each.edit.vector, each.has_rows) for each in made if each.edit.vector is not None]
        self._vectors.clear()
        self.tensor_bytes = sum(len(tensor.data) for tensor, has_rows in tensors if has_rows)
        for vector in {id(tensor): tensor for tensor, has_rows in tensors if not has_rows}.values():
            self._count_tensor(vector, has_rows=False)  # to compare each would take long

    def _count_tensor(self, tensor: TensorData | None, has_rows: bool) -> None:
        if tensor is not None and (has_rows or tensor not in self._vectors):
            self.tensor_bytes += len(tensor.data)
            if not has_rows:
                self._vectors.add(tensor)


def _cut(entry: Entry, length: int) -> Entry:
    """The part before position `length`, of which there is at least one."""
    part = entry.made.clip(0, length)
    assert part is not None
    return Entry(part, part.edit.digest())
