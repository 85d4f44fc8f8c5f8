"""Sessions: open, look, list, close, fork, rewind, their phase, moves, and files."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from app.cluster.cluster import Cluster
from app.domain.errors import FieldOutOfRange, NoCluster
from app.domain.values import KVPolicy, Residency, SessionId, SessionState
from app.exports import exports as session_files
from app.exports.exports import read_chunks, write_chunks
from app.routers.dependencies import (
    AnySessionDep,
    CleanupDep,
    KeyedDep,
    OperatorDep,
    OperatorOnlyDep,
    OwnerDep,
    Services,
    ServicesDep,
    SessionDep,
    errors,
    note_session,
)
from app.sessions.keyed import KeyedRequest
from app.sessions.session import Session
from app.sessions.side_work import FILE_BYTES_PER_S, Lane
from app.text.generation import whole_pieces
from app.web.bodies import FILE, FILE_BODY, JsonRoute, file_type
from app.wire.base import MoveBody, MoveView, SettleBody
from app.wire.history import ClosedPage, ClosedQuery, Timeline, TimelineQuery
from app.wire.sessions import (
    MAX_LABELS,
    MAX_TTL_S,
    CreateSessionBody,
    HistoryQuery,
    HistoryView,
    ListSessionsQuery,
    PhaseBody,
    PhaseView,
    RewindBody,
    SessionPage,
    SessionView,
    UpdateSessionBody,
)

router = APIRouter(prefix="/v1/sessions", tags=["sessions"], route_class=JsonRoute)

DEFAULT_SESSION = CreateSessionBody()


@router.post("", operation_id="createSession", status_code=201, responses=errors(400, 404, 429, 503))
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
    adapter = registry.adapters.find(body.model)
    if body.residency is Residency.GUARANTEED:
        session = await registry.create_guaranteed(owner, metadata=body.metadata, ttl_s=ttl_s, adapter=adapter)
    else:
        session = registry.create(owner, metadata=body.metadata, ttl_s=ttl_s, adapter=adapter)
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


@router.get("", operation_id="listSessions", response_model=SessionPage, responses=errors())
async def list_sessions(
    query: Annotated[ListSessionsQuery, Query()], services: ServicesDep, owner: OwnerDep, is_operator: OperatorDep
) -> Any:
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
    return {"data": data, "has_more": len(page) > query.limit}


@router.get("/closed", operation_id="listClosedSessions", response_model=ClosedPage, responses=errors(503))
async def list_closed_sessions(
    query: Annotated[ClosedQuery, Query()], services: ServicesDep, owner: OwnerDep, is_operator: OperatorDep
) -> Any:
    """The caller's sessions that closed in the last 30 days, the last one first; for an operator those of all."""
    found = await services.history.list_closed(
        owner, is_operator=is_operator, find=query.find, before=query.before, limit=query.limit + 1
    )
    return {"data": found[: query.limit], "has_more": len(found) > query.limit}


@router.get("/{session_id}", operation_id="getSession", responses=errors(404))
async def get_session(session: AnySessionDep, owner: OwnerDep) -> SessionView:
    """The session as it is now."""
    return SessionView.of(session).seen_by(owner)


@router.get("/{session_id}/history", operation_id="getHistory", responses=errors(404))
async def get_history(
    session: SessionDep, query: Annotated[HistoryQuery, Query()], services: ServicesDep
) -> HistoryView:
    """The tokens that the session holds, in order: `token_ids[i]` stands at the position `start` + i that `rewind`
    means. A running turn's tokens are in it as they are generated.
    """
    history, tokens = session.history[:], services.tokens
    found, text, pieces = history[query.start :].tolist(), "", None
    if query.pieces or query.start:
        pieces = await services.side_work.run(session.owner, whole_pieces, tokens, history, query.start)
        text = "".join(pieces)
    else:
        text = await services.side_work.run(session.owner, tokens.decode, found, skip_special_tokens=False)
    return HistoryView(tokens=len(history), token_ids=found, text=text, pieces=pieces if query.pieces else None)


@router.patch("/{session_id}", operation_id="updateSession", responses=errors(400, 404))
async def update_session(session: SessionDep, body: UpdateSessionBody, services: ServicesDep) -> SessionView:
    """Set labels of the session, or take them away."""
    labels = {name: label for name, label in (session.metadata | body.metadata).items() if label is not None}
    if len(labels) > MAX_LABELS:
        raise FieldOutOfRange.at("metadata", f"a session has at most {MAX_LABELS} labels")
    session.relabel(labels)
    services.sessions.keeper.note(session)
    await services.sessions.keeper.settled(session)
    return SessionView.of(session)


@router.get("/{session_id}/timeline", operation_id="getTimeline", response_model=Timeline, responses=errors(404, 503))
async def get_timeline(
    session_id: str,
    query: Annotated[TimelineQuery, Query()],
    services: ServicesDep,
    owner: OwnerDep,
    is_operator: OperatorDep,
) -> Any:
    """What happened to a session in the last 30 days, also after restarts and once it is closed. In a cluster, it
    begins when the session came to its present home.
    """
    table = services.sessions.table
    if table.find(SessionId(session_id)) is None:
        table.require_home(SessionId(session_id), owner, is_operator)
    found = await services.history.timeline(
        SessionId(session_id), owner, is_operator=is_operator, before=query.before, limit=query.limit + 1
    )
    if not found and query.before is None:
        table.get(session_id, owner, or_any=is_operator)
    return {"data": found[: query.limit], "has_more": len(found) > query.limit}


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
    services.sessions.pauses.cancel(session, session.turn)
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


@router.post("/{session_id}/phase", operation_id="setPhase", responses=errors(400, 404, 409))
async def set_phase(session: AnySessionDep, body: PhaseBody, services: ServicesDep) -> PhaseView:
    """Say what the session is doing, and when it will go on. Answers at once; KV moves in the background.
    An operator may say it of the sessions of all tenants.

    A turn makes the phase `compute` by itself.
    """
    services.sessions.set_phase(session, body.phase, body.resume_in_ms)
    return PhaseView.of(session, leaves=KVPolicy(services.settings.kv_policy) is KVPolicy.SIGNAL)


@router.post(
    "/{session_id}/move",
    operation_id="moveSession",
    responses=errors(400, 404, 409, 421, 502, 503),
    dependencies=[OperatorOnlyDep],
)
async def move_session(session: AnySessionDep, body: MoveBody, services: ServicesDep) -> MoveView:
    """Move the session to another server, KV included. Only an operator may. Requests for it get 409 `moving`
    meanwhile, and afterwards 421 `moved` with the header `Djinn-Home`.
    """
    peer, sent, seconds = await _cluster(services).departures.move(session, body.replica)
    return MoveView(
        id=session.id,
        replica=peer.name,
        url=peer.seen.url,
        tokens=sent.tokens,
        tokens_with_kv=sent.computed_tokens,
        bytes=sent.bytes,
        seconds=seconds,
    )


@router.post(
    "/{session_id}/settle",
    operation_id="settleSession",
    responses=errors(400, 404, 409, 421, 503),
    dependencies=[OperatorOnlyDep],
)
async def settle_session(session_id: str, body: SettleBody, services: ServicesDep, owner: OwnerDep) -> SessionView:
    """Keep a session that is locked in a move to a server that never comes back. Only an operator may. The session goes
    on here as it was before the move; what else was on the dead server is lost.
    """
    session = await _cluster(services).departures.settle(SessionId(session_id), body.peer_is_dead)
    return SessionView.of(session).seen_by(owner)


def _cluster(services: Services) -> Cluster:
    if services.cluster is None:
        raise NoCluster("this server is in no cluster: it was started without --cluster")
    return services.cluster


files_router = APIRouter(prefix="/v1/sessions", tags=["sessions"])

IMPORT_PATH = f"{files_router.prefix}/import"


@files_router.get(
    "/{session_id}/export",
    operation_id="exportSession",
    response_class=StreamingResponse,
    responses={**errors(404, 409, 429, 503), 200: {"content": FILE}},
)
async def export_session(
    request: Request, session: SessionDep, services: ServicesDep, cleanup: CleanupDep
) -> StreamingResponse:
    """The session as one safetensors file: history, KV, `metadata` and `ttl_s`, with a checksum over all of it.

    KV that has been dropped is left out; the importing server computes it again.
    """
    file = await cleanup.enter_async_context(services.spool.file(session.owner))
    async with services.side_work.turn(session.owner, Lane.FILE) as piece:
        await session_files.export_session(services.sessions, session, file)
        piece.seconds = file.claimed / FILE_BYTES_PER_S
    opened = cleanup.enter_context(await asyncio.to_thread(file.path.open, "rb"))
    headers = {
        "Content-Disposition": f'attachment; filename="{session.id}.safetensors"',
        "Content-Length": str(file.path.stat().st_size),
    }
    return StreamingResponse(read_chunks(opened), headers=headers, media_type=file_type(request))


@files_router.post(
    "/import",
    operation_id="importSession",
    status_code=201,
    responses=errors(400, 429, 503),
    openapi_extra=FILE_BODY,
)
async def import_session(request: Request, services: ServicesDep, owner: OwnerDep, cleanup: CleanupDep) -> SessionView:
    """Open a session from an exported file, which is the body. Refuses one that is damaged or of another model."""
    services.sessions.check_room(owner)  # before a byte of it is read
    file = await cleanup.enter_async_context(services.spool.file(owner))
    file.claim(int(request.headers.get("Content-Length", 0)))
    await write_chunks(file, request.stream())
    async with services.side_work.turn(owner, Lane.FILE) as piece:
        piece.seconds = file.claimed / FILE_BYTES_PER_S
        session = await session_files.import_session(services.sessions, file.path, owner)
    note_session(request, session)
    return SessionView.of(session)
