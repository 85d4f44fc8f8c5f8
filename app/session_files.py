"""Sessions that travel between servers as files."""

from __future__ import annotations

import asyncio
import json
from array import array
from pathlib import Path

from app.domain import SessionState
from app.errors import BadExport
from app.messages import Export, ExportedKV, Import, ImportedKV
from app.schemas.sessions import SessionLabels
from app.session import Session
from app.session_table import new_session_id
from app.sessions import SessionRegistry


async def export_session(registry: SessionRegistry, session: Session, path: Path) -> ExportedKV:
    """Write the session to the file `path`. Raises `WrongState` unless idle, `EngineError` if there is no room."""
    session.require(SessionState.IDLE, to="export")
    about = json.dumps({"metadata": session.metadata, "ttl_s": session.ttl_s})
    exported: ExportedKV = await registry.executor.call(lambda ticket: Export(ticket, session.id, str(path), about))
    return exported


async def import_session(registry: SessionRegistry, path: Path, owner: str | None = None) -> Session:
    """Open a session from the exported file `path`. Raises `BadExport`, `SessionLimit`, `Draining`, `NotDurable`."""
    session = Session(new_session_id(), owner)
    # A namespace of its own, because nobody but the importer should trust the KV in the file.
    found: ImportedKV
    async with registry.opening(session):
        call = registry.executor.call(lambda ticket: Import(ticket, session.id, str(path), session.id))
        importing = asyncio.ensure_future(call)
        try:
            found = await asyncio.shield(importing)
        except asyncio.CancelledError:
            await asyncio.wait([importing])  # before that the engine has no session that could be closed
            raise
    try:
        labels = SessionLabels.model_validate(json.loads(found.about))
    except (ValueError, RecursionError) as error:
        registry.drop(session)
        raise BadExport("the file's metadata or ttl_s is not what a session can have") from error
    session.metadata, session.ttl_s = labels.metadata, labels.ttl_s
    session.history = array("I", found.token_ids)
    await registry.keep(session)
    return session
