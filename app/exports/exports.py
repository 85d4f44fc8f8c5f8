"""Sessions that travel between servers as files."""

from __future__ import annotations

import asyncio
from array import array
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError

from app.domain.errors import BadExport, Busy, FieldOutOfRange, TooLarge, WrongState
from app.domain.values import MAX_LABEL_BYTES, SessionState
from app.engine_process.turn import Turn
from app.exports.checks import read_snapshot
from app.exports.snapshot import SessionSnapshot, has_room, most_values, take_snapshot
from app.exports.spool import SpoolFile
from app.machine.files import size
from app.messages import Export, ExportedKV, Import, ImportedKV
from app.sessions.registry import SessionRegistry
from app.sessions.session import Pause, Session
from app.web.errors import described
from app.wire.sessions import MAX_TTL_S

MAX_BLOCK_SIZE = 256
"""Tokens of the largest KV block that there is."""
TOKEN_BYTES = 4
LEAD_BYTES = 64 << 10
"""Room for the header and the checksum."""


async def export_session(registry: SessionRegistry, session: Session, file: SpoolFile) -> ExportedKV:
    """Write the session to the file.

    Raises `WrongState` unless it stays idle or paused meanwhile, `TooLarge` if no server would import its edits and
    breakpoints, what `SpoolFile.claim` raises if there is no room, and `EngineError` if it cannot be written all the
    same.
    """
    session.require(SessionState.IDLE, SessionState.PAUSED, to="export")
    here = _place(session)
    snapshot, _, _ = await take_snapshot(registry, session)
    about = await asyncio.to_thread(snapshot.to_json)  # thousands of edits take long
    text, tokens = about.encode(), len(session.history)
    fits = await asyncio.to_thread(has_room, text, tokens)
    _check_place(session, here)
    if not fits:
        raise TooLarge(
            f"the session's metadata, breakpoints, edits and paused turn have {size(len(text))} as JSON; a file may "
            f"have {size(MAX_LABEL_BYTES)} and {most_values(tokens)} values: remove breakpoints, or go on from an "
            "earlier token with fewer edits"
        )
    # All of its KV, up to the end of the last block, and its state.
    info = registry.executor.engine.info
    kept_bytes = (tokens + MAX_BLOCK_SIZE) * info.kv_bytes_per_token + info.state_bytes
    file.claim(kept_bytes + tokens * TOKEN_BYTES + len(text) + LEAD_BYTES)
    path = str(file.path)
    exported: ExportedKV = await registry.executor.call(lambda ticket: Export(ticket, session.id, path, about))
    file.wrote(file.claimed)
    _check_place(session, here)
    return exported


async def import_session(registry: SessionRegistry, path: Path, owner: str | None = None) -> Session:
    """Open a session from the exported file `path`.

    Raises `BadExport`, `SessionLimit`, `TenantLimit`, `RateLimited`, `Draining`, `JournalUnavailable`.
    """
    session = Session(registry.new_id(), owner)
    session.namespace = session.id
    async with AsyncExitStack() as cleanup, registry.opening(session):
        found, file = await _import(registry, session, path, cleanup)
        try:
            await _furnish(registry, session, found, file)
        except Busy:
            registry.abandon(session)
            raise
        except (ValueError, FieldOutOfRange) as error:
            registry.abandon(session)
            raise BadExport(
                f"the file's metadata, ttl_s, model, breakpoints or paused turn are invalid: {_reason(error)}"
            ) from error
    await registry.keep(session)
    return session


async def _import(
    registry: SessionRegistry, session: Session, path: Path, cleanup: AsyncExitStack
) -> tuple[ImportedKV, BinaryIO]:
    """What the engine finds in the file, and the file, which the engine may have moved. `cleanup` closes it."""

    async def open_and_import() -> tuple[ImportedKV, BinaryIO]:
        file = cleanup.enter_context(await asyncio.to_thread(path.open, "rb"))
        make = partial(Import, session=session.id, path=str(path), namespace=session.id, tenant=session.owner or "")
        return await registry.executor.call(make), file

    importing = asyncio.ensure_future(open_and_import())
    try:
        return await asyncio.shield(importing)
    except asyncio.CancelledError:
        await asyncio.wait([importing])  # before that the engine has no session that could be closed
        raise


async def _furnish(registry: SessionRegistry, session: Session, found: ImportedKV, file: BinaryIO) -> None:
    """Give the session what the file holds. Raises `ValueError` or `FieldOutOfRange` for an invalid snapshot."""
    session.history = array("I", found.token_ids)
    session.uncounted = len(session.history)  # as far as the file has no KV of it

    def read() -> SessionSnapshot:
        file.seek(found.about_at)
        return read_snapshot(registry, file.read(found.about_bytes), session.history)

    snapshot = await asyncio.to_thread(read)
    session.metadata, session.ttl_s = snapshot.metadata, snapshot.ttl_s or MAX_TTL_S
    session.breakpoints = {each.id: each for each in snapshot.breakpoints}
    session.interventions = snapshot.interventions
    turn = snapshot.turn
    if found.adapter:
        session.adapter = registry.adapters.by_digest(found.adapter)
        if session.adapter is None:
            raise FieldOutOfRange(
                f"the session is computed with the LoRA adapter {snapshot.model!r} ({found.adapter[:12]}), which is "
                "not loaded here",
                param="model",
            )
    if turn is None:
        await registry.turns.furnish(session, None, None)
    else:
        place = turn.to_place(session.history)
        await registry.turns.furnish(session, turn.to_turn(), place, sent=place.prompt_tokens)


def _reason(error: ValueError | FieldOutOfRange) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    field, words = next(described(SessionSnapshot, error))
    return f"{field}: {words}" if field else words


def _place(session: Session) -> tuple[Pause | None, Turn | None, int]:
    """Where a session is. What the engine writes later is of the same history only there."""
    return session.pause, session.turn, len(session.history)


def _check_place(session: Session, place: tuple[Pause | None, Turn | None, int]) -> None:
    """Raise `WrongState` unless the session is still there, where its export began."""
    if place[0] is not None and session.pause is not place[0]:
        raise WrongState(f"cannot export: session {session.id} has been resumed meanwhile")
    if _place(session) != place:
        raise WrongState(f"cannot export: the history of session {session.id} has changed meanwhile; export again")
