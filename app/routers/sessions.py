"""Sessions: open, look, list, close, cancel, fork, rewind."""

from typing import Annotated

from fastapi import APIRouter, Query, Request

from app.domain.values import Residency, SessionId, SessionState
from app.routers.dependencies import (
    AnySessionDep,
    KeyedDep,
    OperatorDep,
    OwnerDep,
    Services,
    ServicesDep,
    SessionDep,
    errors,
    note_session,
)
from app.sessions.keyed import KeyedRequest
from app.sessions.session import Session
from app.text.detokenizer import whole_pieces
from app.web.json_body import JsonRoute
from app.wire.sessions import (
    MAX_TTL_S,
    CreateSessionBody,
    HistoryQuery,
    HistoryView,
    ListSessionsQuery,
    RewindBody,
    SessionPage,
    SessionView,
)

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], route_class=JsonRoute)

DEFAULT_SESSION = CreateSessionBody()


@router.post("", operation_id="createSession", status_code=201, responses=errors(400, 429, 503))
async def create_session(
    request: Request,
    services: ServicesDep,
    owner: OwnerDep,
    keyed: KeyedDep,
    body: CreateSessionBody = DEFAULT_SESSION,
) -> SessionView:
    """Open an empty session."""
    registry, ttl_s = services.sessions, body.ttl_s or MAX_TTL_S
    if keyed is not None and keyed.is_done:
        return _opened_before(request, services, keyed)
    if body.residency is Residency.GUARANTEED:
        session = await registry.create_guaranteed(owner, metadata=body.metadata, ttl_s=ttl_s)
    else:
        session = registry.create(owner, metadata=body.metadata, ttl_s=ttl_s)
    await registry.keep(session, keyed)
    return _opened(request, session, keyed)


def _opened(request: Request, session: Session, keyed: KeyedRequest | None) -> SessionView:
    note_session(request, session)
    if keyed is not None:
        keyed.is_answered = True
    return SessionView.of(session)


def _opened_before(request: Request, services: Services, keyed: KeyedRequest) -> SessionView:
    """The session that the request has opened when it came first. Raises `NotFound` if it has expired."""
    assert keyed.session is not None
    return _opened(request, services.sessions.table.get(keyed.session, keyed.owner), keyed)


@router.get("", operation_id="listSessions", responses=errors())
async def list_sessions(
    query: Annotated[ListSessionsQuery, Query()], services: ServicesDep, owner: OwnerDep, is_operator: OperatorDep
) -> SessionPage:
    """The caller's sessions, oldest first; for an operator those of all tenants."""
    after = None if query.after is None else SessionId(query.after)
    page = services.sessions.table.page(
        owner,
        everybody=is_operator and query.name is None,
        limit=query.limit + 1,
        after=after,
        state=query.state,
        tier=query.tier,
        name=query.name,
    )
    data = [SessionView.of(session).seen_by(owner) for session in page[: query.limit]]
    return SessionPage(data=data, has_more=len(page) > query.limit)


@router.get("/{session_id}", operation_id="getSession", responses=errors(404))
async def get_session(session: AnySessionDep, owner: OwnerDep) -> SessionView:
    """The session as it is now."""
    return SessionView.of(session).seen_by(owner)


@router.get("/{session_id}/history", operation_id="getHistory", responses=errors(404))
async def get_history(
    session: SessionDep, query: Annotated[HistoryQuery, Query()], services: ServicesDep
) -> HistoryView:
    """Every token that the session holds, in order: `token_ids[i]` stands at the position i that `rewind` means."""
    token_ids = session.history.tolist()
    if query.pieces:
        pieces = await services.side_work.run(session.owner, whole_pieces, services.tokens, token_ids)
        return HistoryView(tokens=len(token_ids), token_ids=token_ids, text="".join(pieces), pieces=pieces)
    text = await services.side_work.run(session.owner, services.tokens.decode, token_ids, skip_special_tokens=False)
    return HistoryView(tokens=len(token_ids), token_ids=token_ids, text=text, pieces=None)


@router.delete("/{session_id}", operation_id="closeSession", status_code=204, responses=errors(404))
async def close_session(session: AnySessionDep, services: ServicesDep) -> None:
    """Close the session; everything that it held is free when this answers. A running turn ends as cancelled."""
    await services.sessions.close(session)


@router.post("/{session_id}/cancel", operation_id="cancelTurn", responses=errors(404, 409))
async def cancel_turn(session: SessionDep, services: ServicesDep) -> SessionView:
    """End the running or paused turn, even of another client; the session is idle, with what was generated, when this
    answers.
    """
    session.require(SessionState.QUEUED, SessionState.RUNNING, SessionState.PAUSED, to="cancel")
    assert session.turn is not None
    services.sessions.ends.cancel(session, session.turn)
    await session.turn.ended.wait()
    await services.sessions.keeper.settled(session)
    return SessionView.of(session)


@router.post(
    "/{session_id}/fork", operation_id="forkSession", status_code=201, responses=errors(400, 404, 409, 429, 503)
)
async def fork_session(request: Request, session: SessionDep, services: ServicesDep, keyed: KeyedDep) -> SessionView:
    """Open a session with the same history and breakpoints that shares this one's KV. That of a paused session is
    paused in the same place.
    """
    if keyed is not None and keyed.is_done:
        return _opened_before(request, services, keyed)
    return _opened(request, await services.sessions.fork(session, keyed), keyed)


@router.post("/{session_id}/rewind", operation_id="rewindSession", responses=errors(400, 404, 409))
async def rewind_session(session: SessionDep, body: RewindBody, services: ServicesDep) -> SessionView:
    """Drop every token of the history from position `to_token` on."""
    await services.sessions.rewind(session, body.to_token)
    return SessionView.of(session)
