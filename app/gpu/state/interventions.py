"""The edits that a session's KV was computed with, by position. With them KV is computed again, and kept apart from KV
that was computed with other edits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

from app.domain.breakpoints import ALL, MAX_INTERVENTION_BYTES, MAX_INTERVENTIONS, Intervention, TensorData
from app.domain.errors import FieldOutOfRange


@dataclass(slots=True)
class _Entry:
    intervention: Intervention
    digest: bytes


class InterventionLog:
    """Edits by position, in the order in which they were made. Most sessions have none, and cost nothing."""

    def __init__(self, made: Iterable[Intervention] = ()) -> None:
        self._entries: list[_Entry] = []
        self._ends: dict[int, int] = {}
        """By boundary: the position after the last that has an edit there."""
        self._tensors: dict[TensorData, int] = {}
        """How many edits have each."""
        self.tensor_bytes = 0
        """Of all tensors, each counted once."""
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
        log._entries = [_Entry(entry.intervention, entry.digest) for entry in self._entries]
        log._ends = dict(self._ends)
        log._tensors, log.tensor_bytes = dict(self._tensors), self.tensor_bytes
        return log

    def check(self, param: str, *, more: int = 0, more_bytes: int = 0) -> None:
        """Raise `FieldOutOfRange` for `param` if the session has too many edits, or would with `more`."""
        count, tensor_bytes = len(self._entries) + more, self.tensor_bytes + more_bytes
        if count > MAX_INTERVENTIONS:
            raise FieldOutOfRange(
                f"{param}: the session's history would be computed with {count} edits, counted at each layer and each "
                f"span of neighbouring positions; the number must be from 0 to {MAX_INTERVENTIONS}: let fewer "
                "positions meet them, or go on from an earlier token",
                param=param,
            )
        if tensor_bytes > MAX_INTERVENTION_BYTES:
            raise FieldOutOfRange(
                f"{param}: the vectors and written activations of the session's edits would have {tensor_bytes} bytes, "
                f"which are kept in case its KV is lost; the number must be from 0 to {MAX_INTERVENTION_BYTES}",
                param=param,
            )

    def add(self, made: Intervention) -> None:
        """Note an edit; one that goes on where the same one ended becomes part of it."""
        digest = made.edit.digest()
        before = self._continued(made, digest)
        if before is None:
            self._entries.append(_Entry(replace(made, edit=replace(made.edit, positions=ALL)), digest))
            self._count(made)
        else:
            before.intervention = replace(before.intervention, end=made.end)
        self._ends[made.boundary] = max(made.end, self._ends.get(made.boundary, 0))

    def forget(self, boundary: int, first: int, end: int) -> None:
        """Drop the edits of this boundary that concern only positions `[first, end)`: all of them are replaced."""
        self._keep(i for i in self.snapshot() if not (i.boundary == boundary and first <= i.first and i.end <= end))

    def within(self, first: int, end: int) -> list[Intervention]:
        """The parts of all edits that concern positions `[first, end)`."""
        touching = (i for i in self.snapshot() if i.first < end and first < i.end)
        return [clip(i, first, end) for i in touching]

    def truncate(self, length: int) -> None:
        """Forget what concerns positions from `length` on."""
        if self.end > length:
            self._keep(clip(i, 0, length) for i in self.snapshot() if i.first < length)

    def fingerprint(self, first: int, end: int) -> bytes:
        """Differs for KV of positions `[first, end)` that was computed with other edits; empty if there were none."""
        parts = self.within(first, end)
        if not parts:
            return b""
        state = hashlib.blake2b(digest_size=16)
        for part in sorted(parts, key=lambda part: part.boundary):  # stable: edits at one boundary keep their order
            state.update(repr((part.first - first, part.end - first, part.boundary)).encode() + part.edit.digest())
        return state.digest()

    def _continued(self, made: Intervention, digest: bytes) -> _Entry | None:
        """The entry that ends where the same edit goes on with `made`."""
        if made.first > self._ends.get(made.boundary, 0) or _has_rows(made):
            return None
        for entry in reversed(self._entries):
            before = entry.intervention
            if before.boundary != made.boundary:
                continue
            if before.end == made.first and entry.digest == digest:
                return entry
            if before.first < made.end and made.first < before.end:
                break  # the order of two edits at one position matters
        return None

    def _keep(self, kept: Iterable[Intervention]) -> None:
        self._entries = [_Entry(each, each.edit.digest()) for each in kept]
        self._ends, self._tensors, self.tensor_bytes = {}, {}, 0
        for entry in self._entries:
            self._count(entry.intervention)
            boundary, end = entry.intervention.boundary, entry.intervention.end
            self._ends[boundary] = max(end, self._ends.get(boundary, 0))

    def _count(self, made: Intervention) -> None:
        """Count the tensor of a new edit, if it has one."""
        tensor = made.edit.vector
        if tensor is None:
            return
        if tensor not in self._tensors:
            self.tensor_bytes += len(tensor.data)
        self._tensors[tensor] = self._tensors.get(tensor, 0) + 1


def clip(intervention: Intervention, first: int, end: int) -> Intervention:
    """The part of an intervention that concerns positions `[first, end)`, which it touches."""
    start, stop = max(first, intervention.first), min(end, intervention.end)
    edit, rows = intervention.edit, intervention.edit.vector
    if rows is not None and len(rows.shape) == 2:
        row_bytes = len(rows.data) // rows.shape[0]
        offset = start - intervention.first
        data = rows.data[offset * row_bytes : (offset + stop - start) * row_bytes]
        edit = replace(edit, vector=TensorData(rows.dtype, (stop - start, rows.shape[1]), data))
    return replace(intervention, first=start, end=stop, edit=edit)


def _has_rows(intervention: Intervention) -> bool:
    """Whether each position has a vector of its own."""
    vector = intervention.edit.vector
    return vector is not None and len(vector.shape) == 2
