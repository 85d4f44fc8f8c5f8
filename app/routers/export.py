"""Sessions as files: take one out of a server, bring it into another that runs the same model."""

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from app.exports import exports as session_files
from app.exports.spool import read_chunks, write_chunks
from app.routers.dependencies import CleanupDep, OwnerDep, ServicesDep, SessionDep, errors, note_session
from app.sessions.guards.side_work import FILE_BYTES_PER_S, Lane
from app.web.binary import FILE, FILE_BODY, body_chunks, file_type
from app.wire.sessions import SessionView

router = APIRouter(prefix="/v1/sessions", tags=["sessions"])

IMPORT_PATH = f"{router.prefix}/import"


@router.get(
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


@router.post(
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
    await write_chunks(file, body_chunks(request))
    async with services.side_work.turn(owner, Lane.FILE) as piece:
        piece.seconds = file.claimed / FILE_BYTES_PER_S
        session = await session_files.import_session(services.sessions, file.path, owner)
    note_session(request, session)
    return SessionView.of(session)
