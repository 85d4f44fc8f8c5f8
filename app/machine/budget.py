"""What all share and may run out of: memory for bodies and log-probabilities, files on their way, bytes on disks."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from app.machine import files
from app.machine.files import size

Refuse = Callable[[int, int, int], Exception]
"""Makes the error: takes what all holders have, what this holder has (0 if only the thing itself), and how much the
thing needs.
"""


def leaves_as_much(limit: int, *, taken: int, more: int, besides: int, whole: int) -> bool:
    """Whether a holder may have `more` for one thing, which is `whole` then, where all together have `taken`.

    A holder with several things must leave as much of `limit` free as it takes; `besides` is what its other things
    take. Its only thing may take all (Choudhury and Hahne, *Dynamic queue length thresholds*, 1998). So every holder
    finds room, and a single holder gets half.
    """
    own = besides + whole if besides else 0
    return taken + more + own <= limit


class Budget:
    """At most `limit` at once, which holders share as `leaves_as_much` says. A holder that is None leaves nothing to
    others. One thread uses it.
    """

    def __init__(self, limit: int, refuse: Refuse) -> None:
        self.limit = limit
        self._refuse = refuse
        self._taken = Counter[str | None]()
        """Of each holder that has some."""
        self._total = 0

    def require(self, holder: str | None, more: int, held: int = 0) -> None:
        """Raise the error of `refuse` unless the holder may have `more` for a thing that has `held` so far."""
        own = 0 if holder is None else self._taken[holder]
        besides, whole = max(0, own - held), held + more
        if not leaves_as_much(self.limit, taken=self._total, more=more, besides=besides, whole=whole):
            raise self._refuse(self._total, own if besides else 0, whole)

    def take(self, holder: str | None, more: int, held: int = 0) -> None:
        """`require` it and count it. Takes nothing if that raises."""
        self.require(holder, more, held)
        self._taken[holder] += more
        self._total += more

    def give(self, holder: str | None, count: int) -> None:
        """Give back what was taken."""
        self._total -= count
        self._taken[holder] -= count
        if not self._taken[holder]:
            del self._taken[holder]


def byte_budget(max_bytes: int, what: str, error: Callable[[str], Exception], by: str = "tenant") -> Budget:
    """What all of `what` may have together, in bytes. Refusals are an `error` of words; `by` names the holders."""

    def refuse(taken: int, own: int, needed: int) -> Exception:
        whose = f", {size(own)} of it by this {by}, who leaves others as much" if own else ""
        room = f"{size(taken)} of the {size(max_bytes)} that they may have{whose}"
        return error(f"{what} take {room}; this one needs {size(needed)}")

    return Budget(max_bytes, refuse)


class Share:
    """What one thing has of a room, such as one body or one file that is written."""

    def __init__(self, room: Budget | DiskRoom, holder: str | None = None) -> None:
        self._room = room
        self._holder = holder
        self.held = 0

    def grow(self, more: int) -> None:
        """Have `more` than before. Raises the room's error."""
        self._room.take(self._holder, more, self.held)
        self.held += more

    def require(self, count: int) -> None:
        """Have `count` at least. Raises the room's error."""
        if count > self.held:
            self.grow(count - self.held)

    def give(self, count: int) -> None:
        """Give back so much, or all if it has less."""
        count = min(count, self.held)
        self._room.give(self._holder, count)
        self.held -= count

    def shrink(self, count: int = 0) -> None:
        """Have no more than `count`."""
        if self.held > count:
            self.give(self.held - count)


class DiskFull(OSError):
    """A file would take room that is not there, or that is reserved. `strerror` says how much is missing."""


class DiskRoom:
    """What is free on the disk of `folder`, without `reserve` bytes. Any thread may use it."""

    def __init__(self, folder: Path, reserve: int = 0) -> None:
        self._folder = folder
        self.reserve = reserve
        self._claimed = 0
        self._lock = threading.Lock()

    @property
    def free(self) -> int:
        """Bytes that are free, without the reserve. Raises `OSError`."""
        return max(0, files.free_bytes(self._folder) - self.reserve)

    @property
    def total(self) -> int:
        """Bytes of the disk, once the folder is there. Raises `OSError`."""
        return files.disk_bytes(self._folder)

    @property
    def missing(self) -> int:
        """Bytes of the reserve that are not free. Raises `OSError`."""
        return max(0, self.reserve - files.free_bytes(self._folder))

    @contextmanager
    def claiming(self, count: int = 0) -> Iterator[Share]:
        """Claim `count` bytes for a file that is written meanwhile: what is written is given back, as the disk itself
        counts it from then on. Raises `DiskFull`.
        """
        claim = Share(self)
        claim.grow(count)
        try:
            yield claim
        finally:
            claim.shrink()

    def take(self, holder: str | None, count: int, held: int = 0) -> None:
        """Claim bytes for any holder. Raises `DiskFull`."""
        with self._lock:
            room = files.free_bytes(self._folder) - self.reserve - self._claimed
            if count > max(0, room):
                reserved = f" beside {size(self.reserve)} that are kept for the journal" if self.reserve else ""
                raise DiskFull(
                    errno.ENOSPC, f"{size(count)} are needed on disk, {size(max(0, room))} are free{reserved}"
                )
            self._claimed += count

    def give(self, holder: str | None, count: int) -> None:
        """Let go of bytes that were claimed."""
        with self._lock:
            self._claimed -= count

    def beside(self, folder: Path) -> DiskRoom:
        """The room for files in `folder`: this one if they share the disk, else another one without a reserve."""
        return self if _device(folder) == _device(self._folder) else DiskRoom(folder)


def _device(folder: Path) -> int:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return existing.stat().st_dev
