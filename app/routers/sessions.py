"""Sessions: open, look, list, close, cancel, fork, rewind."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query

from app.domain import SessionState
from app.errors import NotFound
from app.routers.dependencies import OwnerDep, Services, ServicesDep, SessionDep, errors
from app.schemas import CreateSessionBody, ListSessionsQuery, RewindBody
from app.session import Session
from app.views import SessionPage, SessionView

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])

DEFAULT_SESSION = CreateSessionBody()


async def _view(services: Services, session: Session) -> SessionView:
    return SessionView.of(session, await services.sessions.session_memory(session))


async def _view_unless_closed(services: Services, session: Session) -> SessionView | None:
    try:
        return await _view(services, session)
    except NotFound:
        return None


@router.post("", operation_id="createSession", status_code=201, responses=errors(400, 429, 503))
async def create_session(
    services: ServicesDep, owner: OwnerDep, body: CreateSessionBody = DEFAULT_SESSION
) -> SessionView:
    """Open an empty session."""
    session = services.sessions.create(owner, metadata=body.metadata, ttl_s=body.ttl_s)
    return await _view(services, session)


@router.get("", operation_id="listSessions", responses=errors())
async def list_sessions(
    query: Annotated[ListSessionsQuery, Query()], services: ServicesDep, owner: OwnerDep
) -> SessionPage:
    """The caller's sessions, oldest first."""
    found = services.sessions.page(owner, limit=query.limit + 1, after=query.after, state=query.state)
    views = await asyncio.gather(*(_view_unless_closed(services, session) for session in found[: query.limit]))
    return SessionPage(data=[view for view in views if view is not None], has_more=len(found) > query.limit)


@router.get("/{session_id}", operation_id="getSession", responses=errors(404))
async def get_session(session: SessionDep, services: ServicesDep) -> SessionView:
    """The session as it is now."""
    return await _view(services, session)


@router.delete("/{session_id}", operation_id="closeSession", status_code=204, responses=errors(404))
async def close_session(session: SessionDep, services: ServicesDep) -> None:
    """Close the session; everything that it held is free when this answers. A running turn ends as cancelled."""
    await services.sessions.close(session)


@router.post("/{session_id}/cancel", operation_id="cancelTurn", responses=errors(404, 409))
async def cancel_turn(session: SessionDep, services: ServicesDep) -> SessionView:
    """End the running turn, whoever started it; the session is idle, with what was generated, when this answers."""
    session.require(SessionState.QUEUED, SessionState.RUNNING, to="cancel")
    assert session.turn is not None
    services.sessions.cancel(session, session.turn)
    await session.turn.ended.wait()
    return await _view(services, session)


@router.post("/{session_id}/fork", operation_id="forkSession", status_code=201, responses=errors(404, 409, 429, 503))
async def fork_session(session: SessionDep, services: ServicesDep) -> SessionView:
    """Open a session with the same history that shares this one's KV."""
    return await _view(services, await services.sessions.fork(session))


@router.post("/{session_id}/rewind", operation_id="rewindSession", responses=errors(400, 404, 409))
async def rewind_session(session: SessionDep, body: RewindBody, services: ServicesDep) -> SessionView:
    """Drop every token of the history from position `to_token` on."""
    await services.sessions.rewind(session, body.to_token)
    return await _view(services, session)
