"""Breakpoints of a session, and what those that capture have recorded."""

import asyncio
import json
from contextlib import AsyncExitStack

from fastapi import APIRouter, Request, Response

from app.domain.activations import Captures
from app.domain.errors import NotFound
from app.routers.dependencies import CleanupDep, OwnerDep, ServicesDep, SessionDep, errors
from app.routers.edits import to_edits
from app.sessions.guards.side_work import FILE_BYTES_PER_S, Lane
from app.web.binary import FILE, PART_BYTES, file_response
from app.web.json_body import JsonRoute
from app.wire.breakpoints import BreakpointBody, BreakpointList, BreakpointView
from app.wire.tensors import write_file

router = APIRouter(prefix="/v1/sessions/{session_id}", tags=["breakpoints"], route_class=JsonRoute)


@router.post("/breakpoints", operation_id="createBreakpoint", status_code=201, responses=errors(400, 404, 409, 503))
async def create_breakpoint(
    session: SessionDep, body: BreakpointBody, services: ServicesDep, owner: OwnerDep
) -> BreakpointView:
    """Arm a breakpoint, whatever the session is doing. Vectors that its edits name are taken as they are now."""
    breakpoint = body.to_breakpoint(services.info, to_edits(body.edits or (), services, owner))
    await services.sessions.breakpoints.arm(session, breakpoint)
    return BreakpointView.model_validate(breakpoint)


@router.get("/breakpoints", operation_id="listBreakpoints", responses=errors(404))
async def list_breakpoints(session: SessionDep) -> BreakpointList:
    """The session's breakpoints. Those that act `once` go when they have."""
    return BreakpointList(data=list(session.breakpoints.values()))


@router.get("/breakpoints/{breakpoint_id}", operation_id="getBreakpoint", responses=errors(404))
async def get_breakpoint(session: SessionDep, breakpoint_id: str) -> BreakpointView:
    """One breakpoint."""
    armed = session.breakpoints.get(breakpoint_id)
    if armed is None:
        raise NotFound(f"no breakpoint {breakpoint_id}", param="breakpoint_id")
    return BreakpointView.model_validate(armed)


@router.delete("/breakpoints", operation_id="deleteBreakpoints", status_code=204, responses=errors(404))
async def delete_breakpoints(session: SessionDep, services: ServicesDep) -> None:
    """Remove all breakpoints of the session. One that is paused stays so."""
    await services.sessions.breakpoints.disarm(session, None)


@router.delete("/breakpoints/{breakpoint_id}", operation_id="deleteBreakpoint", status_code=204, responses=errors(404))
async def delete_breakpoint(session: SessionDep, breakpoint_id: str, services: ServicesDep) -> None:
    """Remove one breakpoint. A session that is paused at it stays so."""
    await services.sessions.breakpoints.disarm(session, breakpoint_id)


@router.get(
    "/captures",
    operation_id="getCaptures",
    response_class=Response,
    responses={**errors(404), 200: {"content": FILE}},
)
async def get_captures(request: Request, session: SessionDep, services: ServicesDep, cleanup: CleanupDep) -> Response:
    """What `capture` breakpoints have recorded, as one safetensors file.

    Each tensor is `[positions, hidden_size]`; sorted by name they are in the order of recording. The metadata has
    JSON under each tensor's name: `breakpoint`, `layer`, `positions`, `token_ids`; and `dropped`, the number of those
    for which there was no room.
    """
    place = await cleanup.enter_async_context(AsyncExitStack())
    piece = await place.enter_async_context(services.side_work.turn(session.owner, Lane.ACTIVATIONS))
    captures = await services.sessions.breakpoints.captures(session)
    content = await asyncio.to_thread(_captures_file, captures)
    piece.seconds = len(content) / FILE_BYTES_PER_S
    if len(content) <= PART_BYTES:
        await place.aclose()  # only what takes memory until it is read keeps its place until then
    return file_response(request, content)


@router.delete("/captures", operation_id="deleteCaptures", status_code=204, responses=errors(404))
async def delete_captures(session: SessionDep, services: ServicesDep) -> None:
    """Forget what has been captured."""
    await services.sessions.breakpoints.clear_captures(session)


def _captures_file(captures: Captures) -> bytes:
    tensors, metadata = {}, {"dropped": str(captures.dropped)}
    width = max(5, len(str(len(captures.records))))
    for index, record in enumerate(captures.records):
        name = f"{index:0{width}}.{record.breakpoint}.layer{record.layer}"
        tensors[name] = record.tensor
        metadata[name] = json.dumps(
            {
                "breakpoint": record.breakpoint,
                "layer": record.layer,
                "positions": record.positions,
                "token_ids": record.token_ids,
            }
        )
    return write_file(tensors, metadata)
