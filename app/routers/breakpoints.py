"""Breakpoints of a session, named vectors, and maps of what it keeps inside the model."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from functools import partial
from typing import Annotated, TypeVar

from fastapi import APIRouter, Query, Request, Response

from app.domain.activations import Captures
from app.domain.breakpoints import Edit, TensorData
from app.domain.errors import FieldOutOfRange, NotFound
from app.routers.dependencies import CleanupDep, OwnerDep, Services, ServicesDep, SessionDep, errors
from app.sessions.session import Session
from app.sessions.side_work import FILE_BYTES_PER_S, Lane
from app.web.bodies import FILE, FILE_BODY, PART_BYTES, JsonRoute, file_response
from app.web.sse import unless_disconnected
from app.wire.breakpoints import (
    DIRECTION_LENGTHS,
    BreakpointBody,
    BreakpointList,
    BreakpointView,
    EditBody,
    VectorList,
    VectorQuery,
    VectorView,
    fits,
)
from app.wire.maps import LensMapQuery, LensMapView, NormsQuery, NormsView
from app.wire.tensors import norm, read_one, to_float32, vector_of, write_file

T = TypeVar("T")


def to_edits(bodies: Iterable[EditBody], services: Services, owner: str | None) -> tuple[Edit, ...]:
    """The edits with the numbers of their vectors.

    Raises `NotFound` for a vector that the owner does not have, `FieldOutOfRange` for one that does not fit.
    """
    return tuple(
        Edit(
            op=body.op,
            factor=1.0 if body.factor is None else body.factor,
            vector=_vector(body, services, owner, param=f"edits.{index}.vector"),
            positions=body.to_positions(),
            max_norm=body.max_norm,
        )
        for index, body in enumerate(bodies)
    )


def _vector(body: EditBody, services: Services, owner: str | None, *, param: str) -> TensorData | None:
    if body.vector is None:
        return None
    if isinstance(body.vector, str):
        vector = vector_of(to_float32(services.vectors.get(owner, body.vector)))
    else:
        vector = vector_of(body.vector)
    size, wanted = vector.shape[0], services.info.hidden_size
    if size != wanted:
        raise FieldOutOfRange(f"{param}: it must have {wanted} numbers, not {size}", param=param)
    if not fits(body.op, vector):
        shortest, longest = DIRECTION_LENGTHS
        raise FieldOutOfRange(
            f"{param}: for {body.op} its length must be from {shortest} to {longest}, not {norm(vector)}", param=param
        )
    return vector


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
    """Arm a breakpoint, whatever the session is doing. Vectors that its edits name are taken as they are now."""
    breakpoint = body.to_breakpoint(services.info, to_edits(body.edits or (), services, owner))
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
async def get_captures(request: Request, session: SessionDep, services: ServicesDep, cleanup: CleanupDep) -> Response:
    """What `capture` breakpoints have recorded, as one safetensors file.

    Each tensor is `[positions, hidden_size]`; sorted by name they are in the order of recording. The metadata has
    JSON under each tensor's name: `breakpoint`, `layer`, `positions`, `token_ids`; and `dropped`, the number of those
    for which there was no room.
    """
    read = partial(services.sessions.whitebox.captures, session)
    return file_response(request, await large_content(services, session, cleanup, read, _captures_file))


@router.delete("/captures", operation_id="deleteCaptures", status_code=204, responses=errors(404))
async def delete_captures(session: SessionDep, services: ServicesDep) -> None:
    """Forget what has been captured."""
    await services.sessions.whitebox.clear_captures(session)


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


vectors_router = APIRouter(prefix="/v1/vectors", tags=["breakpoints"])

VECTOR = "vector"


@vectors_router.post(
    "", operation_id="createVector", status_code=201, responses=errors(400, 503), openapi_extra=FILE_BODY
)
async def create_vector(
    request: Request, query: Annotated[VectorQuery, Query()], services: ServicesDep, owner: OwnerDep
) -> VectorView:
    """Keep a vector under a name: a safetensors file with one tensor `[hidden_size]`. It takes the place of another one
    of that name; edits that were sent before keep the old one.
    """
    content = await request.body()
    vector = await services.side_work.run(owner, _read_vector, content, services.info.hidden_size)
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


def _read_vector(content: bytes, hidden_size: int) -> TensorData:
    _, vector, _ = read_one(content, param=VECTOR)
    if vector.shape != (hidden_size,):
        raise FieldOutOfRange(f"shape: it must be [{hidden_size}], not {list(vector.shape)}", param="shape")
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
    if not norm(vector):
        raise FieldOutOfRange(f"vector: {name} is zero, so nothing has a cosine to it", param="vector")
    return vector
