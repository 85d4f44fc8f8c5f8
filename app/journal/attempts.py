"""Attempts to write a batch: what cannot be written is set aside, and the others are written."""

import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from app.domain.breakpoints import Edit, TensorData
from app.journal.records import TOKEN_BYTES, Change, Departed, Entry, Key, ResponseRecord, WriteBatch
from app.journal.store import SMALL_BYTES, JournalStore

COPIES = 2
"""A change is written to the log first, and then to the file, while it is still in the log."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an attempt has left unwritten, and why."""

    refused: Mapping[Key, str] = field(default_factory=dict)
    """Changes that cannot be written as they are: to try again does not help."""
    delayed: Mapping[Key, str] = field(default_factory=dict)
    """Changes that the file could not take."""
    failure: str | None = None
    """Why the file takes nothing; None: it takes what is not too large."""
    is_full: bool = False
    """Whether it takes nothing because there is no room."""


class _NoRoom(Exception):
    """Said of a change before SQLite tries: its log would keep the last of the disk after a failure."""


def attempt(
    store: JournalStore, batch: WriteBatch, free_bytes: Callable[[], int], *, has_failed: bool = False
) -> Outcome:
    """Write all of `batch` that can be written. `free_bytes` tells what is free on the disk.

    A journal that `has_failed` has to prove that it can be written again: what is left of a change that was taken back
    may need no room at all.
    """
    outcome = _attempt(store, batch, free_bytes)
    if not has_failed or outcome.failure is not None:
        return outcome
    try:
        _require_room(SMALL_BYTES, free_bytes())
        store.prove_writable()
    except Exception as error:
        return replace(outcome, failure=str(error), is_full=_is_full(error))
    return outcome


def _attempt(store: JournalStore, batch: WriteBatch, free_bytes: Callable[[], int]) -> Outcome:
    try:
        _require_room(sum(map(bytes_of, batch.values())), free_bytes())
        return Outcome(refused=store.apply(batch))
    except Exception as error:  # whatever it is, those who wait must hear of it
        if not _is_full(error):
            return Outcome(delayed=dict.fromkeys(batch, str(error)), failure=str(error))
        return _one_by_one(store, batch, free_bytes)


def _one_by_one(store: JournalStore, batch: WriteBatch, free_bytes: Callable[[], int]) -> Outcome:
    """Write changes while they fit, the smallest first. Closed sessions make room."""
    refused: dict[Key, str] = {}
    delayed: dict[Key, str] = {}
    reason = failure = None
    is_full = False
    for key, entry in sorted(batch.items(), key=lambda item: bytes_of(item[1])):
        if reason is None:
            try:
                _require_room(bytes_of(entry), free_bytes())
                refused |= store.apply({key: entry})
                continue
            except Exception as error:
                reason = str(error)
                is_full = _is_full(error)
                failure = None if is_full and bytes_of(entry) > SMALL_BYTES else reason
        delayed[key] = reason
    return Outcome(refused, delayed, failure, is_full)


def bytes_of(entry: Entry) -> int:
    """About how many bytes the change has to write, vectors that the journal has already included."""
    match entry:
        case Change():
            edits = [edit for each in entry.breakpoints or () for edit in each.edits]
            edits += [made.edit for made in entry.interventions.rows.values()] if entry.interventions else []
            responses = sum(len(each.body) for each in entry.responses)
            keyed = sum(TOKEN_BYTES * len(each.turn.token_ids) for each in entry.keyed if each.turn is not None)
            own = len(entry.token_ids) + len(entry.record.metadata)
            return own + sum(_tensors(edits).values()) + responses + keyed
        case TensorData():
            return len(entry.data)
        case ResponseRecord():
            return len(entry.body)
        case Departed() | None:
            return 0


def _tensors(edits: list[Edit]) -> dict[int, int]:
    """Bytes of each tensor, which many edits may share."""
    return {id(edit.vector.data): len(edit.vector.data) for edit in edits if edit.vector is not None}


def _require_room(count: int, free: int) -> None:
    if COPIES * count > free:
        raise _NoRoom(f"the disk is full: {COPIES * count} bytes are needed, {free} are free")


def _is_full(error: Exception) -> bool:
    """Whether the disk, or what SQLite may have of it, has no room for what was written."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return isinstance(error, _NoRoom) or code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
