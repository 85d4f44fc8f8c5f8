"""Breakpoints of a session, named vectors, and maps of what it keeps inside the model."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, TypeVar

from fastapi import APIRouter, Query, Request, Response

from app.domain.activations import Captures
from app.domain.breakpoints import TensorData
from app.domain.errors import FieldOutOfRange, NotFound
from app.domain.points import Point, find_point
from app.routers.dependencies import CleanupDep, OwnerDep, Services, ServicesDep, SessionDep, errors
from app.routers.edits import to_edits
from app.sessions.session import Session
from app.sessions.side_work import FILE_BYTES_PER_S, Lane
from app.web.bodies import FILE, FILE_BODY, PART_BYTES, JsonRoute, file_response
from app.web.sse import unless_disconnected
from app.wire.breakpoints import (
    BreakpointBody,
    BreakpointList,
    BreakpointView,
    CapturesQuery,
    VectorList,
    VectorQuery,
    VectorView,
)
from app.wire.maps import LensMapQuery, LensMapView, NormsQuery, NormsView
from app.wire.tensors import norm, read_one, write_file

T = TypeVar("T")


async def large_content(
    services: Services,
    session: Session,
    cleanup: AsyncExitStack,
    read: Callable[[], Awaitable[T]],
    write: Callable[[T], bytes],
) -> bytes:
    """What `write` makes of what the engine lets one `read`, when it is the turn of the session's tenant."""
    place = await cleanup.enter_async_context(AsyncExitStack())
    piece = await place.enter_async_context(services.side_work.turn(session.owner, Lane.ACTIVATIONS))
    content = await asyncio.to_thread(write, await read())
    piece.seconds = len(content) / FILE_BYTES_PER_S
    if len(content) <= PART_BYTES:
        await place.aclose()  # only what takes memory until it is read keeps its place until then
    return content


router = APIRouter(prefix="/v1/sessions/{session_id}", tags=["breakpoints"], route_class=JsonRoute)


@router.post("/breakpoints", operation_id="createBreakpoint", status_code=201, responses=errors(400, 404, 409, 503))
async def create_breakpoint(
    session: SessionDep, body: BreakpointBody, services: ServicesDep, owner: OwnerDep
) -> BreakpointView:
    """Arm a breakpoint, whatever the session is doing. What its edits name, vectors and what sessions keep, is taken as
    it is now.
    """
    target = body.to_target(services.info)
    edits = await to_edits(body.edits or (), services, owner, target)
    breakpoint = body.to_breakpoint(services.info, target, edits)
    await services.sessions.whitebox.arm(session, breakpoint)
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
    await services.sessions.whitebox.disarm(session, None)


@router.delete("/breakpoints/{breakpoint_id}", operation_id="deleteBreakpoint", status_code=204, responses=errors(404))
async def delete_breakpoint(session: SessionDep, breakpoint_id: str, services: ServicesDep) -> None:
    """Remove one breakpoint. A session that is paused at it stays so."""
    await services.sessions.whitebox.disarm(session, breakpoint_id)


@router.get(
    "/captures",
    operation_id="getCaptures",
    response_class=Response,
    responses={**errors(404), 200: {"content": FILE}},
)
async def get_captures(
    request: Request,
    session: SessionDep,
    query: Annotated[CapturesQuery, Query()],
    services: ServicesDep,
    cleanup: CleanupDep,
) -> Response:
    """What `capture` breakpoints have recorded, as one safetensors file.

    Each tensor is `[positions, width]`, or `[positions, heads, head_dim]` where there are heads, and of patterns
    `[positions, heads, keys]`. Sorted by name, which ends with the point unless that is `resid_post`, they are in the
    order of recording. The metadata has JSON under each tensor's name: `breakpoint`, `layer`, `point`, `heads` (null:
    all), `positions`, `token_ids`; and `dropped`, the number of those for which there was no room.
    """
    point, layer = (None, None) if query.point is None else find_point(query.point) or (None, None)
    read = partial(services.sessions.whitebox.captures, session, point, query.layer if layer is None else layer)
    return file_response(request, await large_content(services, session, cleanup, read, _captures_file))


@router.delete("/captures", operation_id="deleteCaptures", status_code=204, responses=errors(404))
async def delete_captures(session: SessionDep, services: ServicesDep) -> None:
    """Forget what has been captured."""
    await services.sessions.whitebox.clear_captures(session)


def _captures_file(captures: Captures) -> bytes:
    tensors, metadata = {}, {"dropped": str(captures.dropped)}
    width = max(5, len(str(len(captures.records))))
    for index, record in enumerate(captures.records):
        at = "" if record.point is Point.RESID_POST else f".{record.point}"
        name = f"{index:0{width}}.{record.breakpoint}.layer{record.layer}{at}"
        tensors[name] = record.tensor
        metadata[name] = json.dumps(
            {
                "breakpoint": record.breakpoint,
                "layer": record.layer,
                "point": record.point,
                "heads": record.heads or None,
                "positions": record.positions,
                "token_ids": record.token_ids,
            }
        )
    return write_file(tensors, metadata)


vectors_router = APIRouter(prefix="/v1/vectors", tags=["breakpoints"])

VECTOR = "vector"


@vectors_router.post(
    "", operation_id="createVector", status_code=201, responses=errors(400, 503), openapi_extra=FILE_BODY
)
async def create_vector(
    request: Request, query: Annotated[VectorQuery, Query()], services: ServicesDep, owner: OwnerDep
) -> VectorView:
    """Keep a vector under a name: a safetensors file with one tensor `[size]`, whose size is up to the width of the
    model's widest point. It takes the place of another one
    of that name; edits that were sent before keep the old one.
    """
    content = await request.body()
    widest = max(shape.width for shapes in services.info.points.values() for shape in shapes if shape)
    vector = await services.side_work.run(owner, _read_vector, content, widest)
    await services.vectors.put(owner, query.name, vector)
    return VectorView.of(query.name, vector)


@vectors_router.get("", operation_id="listVectors", responses=errors())
async def list_vectors(services: ServicesDep, owner: OwnerDep) -> VectorList:
    """The caller's vectors."""
    found = services.vectors.owned_by(owner)
    return VectorList(data=[VectorView.of(name, vector) for name, vector in found.items()])


@vectors_router.get(
    "/{name}", operation_id="getVector", response_class=Response, responses={**errors(404), 200: {"content": FILE}}
)
async def get_vector(request: Request, name: str, services: ServicesDep, owner: OwnerDep) -> Response:
    """A vector as safetensors: one tensor `vector`."""
    return file_response(request, write_file({VECTOR: services.vectors.get(owner, name)}))


@vectors_router.delete("/{name}", operation_id="deleteVector", status_code=204, responses=errors(404))
async def delete_vector(name: str, services: ServicesDep, owner: OwnerDep) -> None:
    """Forget a vector. Edits that were sent before keep it."""
    await services.vectors.delete(owner, name)


def _read_vector(content: bytes, widest: int) -> TensorData:
    _, vector, _ = read_one(content, param=VECTOR)
    if len(vector.shape) != 1 or not 1 <= vector.shape[0] <= widest:
        shape = list(vector.shape)
        raise FieldOutOfRange(f"shape: it must be one number of numbers, [1] to [{widest}], not {shape}", param="shape")
    return vector


maps_router = APIRouter(prefix="/v1/sessions/{session_id}", tags=["breakpoints"])


@maps_router.get("/lens", operation_id="getLensMap", responses=errors(404))
async def get_lens_map(
    request: Request, session: SessionDep, query: Annotated[LensMapQuery, Query()], services: ServicesDep
) -> LensMapView:
    """The logit lens at many layers: what `capture` breakpoints have recorded, and the checkpoint of a paused turn.

    The tokens of all sessions go first. A client that disconnects ends it.
    """
    layers = query.to_layers(services.info.num_layers)
    lens = services.sessions.whitebox.lens_map(session, query.to_positions(), layers, query.top_k)
    return LensMapView.of(*await unless_disconnected(request, lens), services.tokens)


@maps_router.get("/norms", operation_id="getNorms", responses=errors(404))
async def get_norms(
    request: Request,
    session: SessionDep,
    query: Annotated[NormsQuery, Query()],
    services: ServicesDep,
    owner: OwnerDep,
) -> NormsView:
    """The L2 length of the same residual streams, and the cosine of each to a vector, if one is named."""
    vector = None if query.vector is None else _direction(query.vector, services, owner)
    layers = query.to_layers(services.info.num_layers)
    norms = services.sessions.whitebox.norms(session, query.to_positions(), layers, vector)
    return NormsView.of(await unless_disconnected(request, norms))


def _direction(name: str, services: Services, owner: str | None) -> TensorData:
    vector = services.vectors.get(owner, name)
    size, wanted = vector.shape[0], services.info.hidden_size
    if size != wanted:
        raise FieldOutOfRange(f"vector: it must have {wanted} numbers, not {size}", param="vector")
    if not norm(vector):
        raise FieldOutOfRange(f"vector: {name} is zero, so nothing has a cosine to it", param="vector")
    return vector
