"""Something in the place of the data of vectors, and the data back: so a file has each vector once. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from app.domain.breakpoints import Breakpoint, Edit, Intervention

Swap = Callable[[bytes], bytes]
"""From a tensor's data to its digest, or back."""


def swapped_breakpoint(breakpoint: Breakpoint, swap: Swap) -> Breakpoint:
    """The breakpoint with other data in the vectors of its edits."""
    return replace(breakpoint, edits=tuple(swapped_edit(edit, swap) for edit in breakpoint.edits))


def swapped_intervention(made: Intervention, swap: Swap) -> Intervention:
    """The intervention with other data in its vector."""
    edit = swapped_edit(made.edit, swap)
    return made if edit is made.edit else replace(made, edit=edit)


def swapped_edit(edit: Edit, swap: Swap) -> Edit:
    """The edit with other data in its vector, if it has one."""
    return edit if edit.vector is None else replace(edit, vector=replace(edit.vector, data=swap(edit.vector.data)))
