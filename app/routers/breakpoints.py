"""Breakpoints of a session, what a paused turn has left, and maps of what a session keeps inside the model."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import Annotated, Any, TypeVar

import orjson
from fastapi import APIRouter, Query, Request, Response

from app.domain.activations import (
    Activation,
    Captures,
    CheckpointInfo,
    Dictionary,
    StoredProbe,
    Translators,
    UploadKind,
)
from app.domain.breakpoints import Action, Edit, Probe, TensorData, Then
from app.domain.errors import FieldOutOfRange, NotFound
from app.domain.points import ABOUT, Point, find_point
from app.routers.dependencies import CleanupDep, OwnerDep, Services, ServicesDep, SessionDep, errors, errors_of_file
from app.routers.edits import checkpoint_target, to_edits, to_gate
from app.sessions.session import Session
from app.sessions.side_work import FILE_BYTES_PER_S, Lane
from app.web.bodies import (
    FILE,
    FILE_BODY,
    OCTET_STREAM,
    PART_BYTES,
    SAFETENSORS,
    JsonRoute,
    LargeAnswer,
    accepted_types,
    file_response,
)
from app.web.sse import unless_disconnected
from app.wire.breakpoints import BreakpointBody, BreakpointList, BreakpointView, CapturesQuery
from app.wire.checkpoint import ActivationQuery, CheckpointView, EditCheckpointBody, LensQuery, LensView
from app.wire.dictionaries import FeaturesQuery, FeaturesView
from app.wire.maps import AttributionQuery, AttributionView, LensMapQuery, LensMapView, NormsQuery, NormsView
from app.wire.points import Target, place_at
from app.wire.probes import ProbeBody
from app.wire.tensors import file_parts, norm, read_one, to_float32, vector_of, write_file

T = TypeVar("T")
NO_SECOND_PASS = "a model whose layers remember cannot run a pass again to pause in it"


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
    info, probe, features, gate = services.info, None, None, None
    edits: tuple[Edit, ...] = ()
    if body.probe is not None:
        probe, target = await _probe(body.probe, services, owner)
    elif body.features is not None:
        dictionary, features = services.uploads.features(owner, body.features.dictionary, body.features.top_k)
        target = place_at(info, dictionary.point, dictionary.layer)
    else:
        target = body.to_target(info)
        edits = await to_edits(body.edits or (), services, owner, target)
        if (field := body.when.value_field) is not None:
            if body.action is Action.PAUSE and info.state_bytes:
                raise FieldOutOfRange.at(f"when.{field}", NO_SECOND_PASS)
            gate = await to_gate(body.when, services, owner, target)
    breakpoint = body.to_breakpoint(info, target, edits, probe, features, gate)
    await services.sessions.whitebox.arm(session, breakpoint)
    return BreakpointView.model_validate(breakpoint)


async def _probe(body: ProbeBody, services: Services, owner: str | None) -> tuple[Probe, Target]:
    """The probe as it is now, and where it is. Raises `NotFound`, `FieldOutOfRange`."""
    found = services.uploads.get(owner, UploadKind.PROBE, body.name, StoredProbe, param="probe.name")
    if body.then is Then.PAUSE and services.info.state_bytes:
        raise FieldOutOfRange.at("probe.then", f"{NO_SECOND_PASS}: only stop goes with it")
    if body.then is Then.PAUSE and (why := ABOUT[found.point].no_pause):
        raise FieldOutOfRange.at("probe.then", f"{found.point} cannot pause: {why}")
    weights = vector_of(await asyncio.to_thread(services.uploads.numbers, found.file))
    probe = Probe(body.name, weights, found.hidden, found.sigmoid, body.above, body.then)
    return probe, place_at(services.info, found.point, found.layer)


@router.get("/breakpoints", operation_id="listBreakpoints", response_model=BreakpointList, responses=errors(404))
async def list_breakpoints(session: SessionDep) -> Any:
    """The session's breakpoints. Those that act `once` go when they have."""
    return {"data": list(session.breakpoints.values())}


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
    return b"".join(file_parts(tensors, metadata))


maps_router = APIRouter(prefix="/v1/sessions/{session_id}", tags=["breakpoints"])


@maps_router.get("/lens", operation_id="getLensMap", responses=errors(404))
async def get_lens_map(
    request: Request,
    session: SessionDep,
    query: Annotated[LensMapQuery, Query()],
    services: ServicesDep,
    owner: OwnerDep,
) -> LensMapView:
    """The logit lens, or an uploaded one, at many layers: of what `capture` breakpoints have recorded, and of the
    checkpoint of a paused turn.

    The tokens of all sessions go first. A client that disconnects ends it.
    """
    uploads, lens, info = services.uploads, None, services.info
    if query.lens is not None:
        lens = uploads.get(owner, UploadKind.LENS, query.lens, Translators)
        uploads.require_loaded(lens, UploadKind.LENS)
    layers, ask = query.to_lens_layers(lens, info.num_layers), query.to_ask(lens, info.vocab_size)
    with ExitStack() as stack:
        beside = None
        if query.beside is not None:
            try:
                beside = stack.enter_context(services.sessions.table.using(query.beside, owner))
            except NotFound as error:
                raise NotFound(error.message, param="beside") from error
        reading = services.sessions.whitebox.lens_map(session, query.to_positions(), layers, ask, beside)
        return LensMapView.of(*await unless_disconnected(request, reading), services.tokens)


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


@maps_router.get("/attribution", operation_id="getAttribution", responses=errors(404))
async def get_attribution(
    request: Request, session: SessionDep, query: Annotated[AttributionQuery, Query()], services: ServicesDep
) -> AttributionView:
    """Direct logit attribution: what each layer, and each `attn_out` and `mlp_out` that is captured, adds to the logit
    of one token less that of another at a position, and so each head where `z` is, and neurons where `mlp_post` is.
    The stream after the last layer must be captured.
    """
    tokens = query.to_tokens(services.info.vocab_size)
    reading = services.sessions.whitebox.attribution(session, query.to_positions(), tokens, query.neurons)
    return AttributionView.of(await unless_disconnected(request, reading), tokens)


@maps_router.get("/features", operation_id="getFeatures", responses=errors(404))
async def get_features(
    request: Request,
    session: SessionDep,
    query: Annotated[FeaturesQuery, Query()],
    services: ServicesDep,
    owner: OwnerDep,
) -> FeaturesView:
    """The most active features of a dictionary at each position for which a `capture` breakpoint at its point, or the
    checkpoint of a paused turn, keeps the stream.
    """
    found = services.uploads.get(owner, UploadKind.DICTIONARY, query.dictionary, Dictionary)
    services.uploads.require_loaded(found, UploadKind.DICTIONARY)
    chosen = query.to_features(found)
    features = services.sessions.whitebox.features(session, query.to_positions(), found, query.top_k, chosen)
    kept, read = await unless_disconnected(request, features)
    return FeaturesView.of(query.dictionary, found, chosen, kept, read, services.tokens)


def _direction(name: str, services: Services, owner: str | None) -> TensorData:
    vector = services.uploads.get(owner, UploadKind.VECTOR, name, TensorData)
    size, wanted = vector.shape[0], services.info.hidden_size
    if size != wanted:
        raise FieldOutOfRange.at("vector", f"it must have {wanted} numbers, not {size}")
    if not norm(vector):
        raise FieldOutOfRange.at("vector", f"{name} is zero, so nothing has a cosine to it")
    return vector


checkpoint_router = APIRouter(
    prefix="/v1/sessions/{session_id}/checkpoint", tags=["breakpoints"], route_class=JsonRoute
)

ACTIVATION = "activation"


@checkpoint_router.get("", operation_id="getCheckpoint", responses=errors(404, 409))
async def get_checkpoint(session: SessionDep) -> CheckpointView:
    """Where the session is paused, and until when."""
    pause = session.require_pause(to="read the checkpoint")
    return CheckpointView.of(pause.info, pause.expires_at)


@checkpoint_router.get(
    "/activation",
    operation_id="getActivation",
    response_class=Response,
    responses={**errors_of_file(404, 409), 200: {"description": "The residual stream", "content": FILE}},
)
async def get_activation(
    request: Request,
    session: SessionDep,
    query: Annotated[ActivationQuery, Query()],
    services: ServicesDep,
    cleanup: CleanupDep,
) -> Response:
    """What stands at the pause as safetensors, one tensor `activation` of `[positions, width]`.

    With `Accept: application/json` it is JSON: `layer`, `point`, `first`, `end`, `dtype` and `values`, a list for each
    position.
    """
    accepted = accepted_types(request)
    as_json = "application/json" in accepted and accepted.isdisjoint((OCTET_STREAM, SAFETENSORS))
    read = partial(services.sessions.whitebox.read_checkpoint, session, query.to_positions())
    content = await large_content(services, session, cleanup, read, _activation_json if as_json else _activation_file)
    return LargeAnswer(content, media_type="application/json") if as_json else file_response(request, content)


@checkpoint_router.put(
    "/activation", operation_id="putActivation", responses=errors(400, 404, 409, 503), openapi_extra=FILE_BODY
)
async def put_activation(request: Request, session: SessionDep, services: ServicesDep) -> CheckpointView:
    """Put another residual stream in the place of this one: a file as `getActivation` gives it for all positions."""
    content = await request.body()
    pause = session.require_pause(to="write the checkpoint")
    tensor = await services.side_work.run(session.owner, _read_activation, content, pause.info)
    await services.sessions.whitebox.write_checkpoint(session, tensor)
    return CheckpointView.of(pause.info, pause.expires_at)


@checkpoint_router.post("/edit", operation_id="editCheckpoint", responses=errors(400, 404, 409, 503))
async def edit_checkpoint(
    session: SessionDep, body: EditCheckpointBody, services: ServicesDep, owner: OwnerDep
) -> CheckpointView:
    """Change the residual stream: every edit, or none if one cannot be made."""
    pause = session.require_pause(to="edit the checkpoint")
    edits = await to_edits(body.edits, services, owner, checkpoint_target(services, pause.info))
    await services.sessions.whitebox.edit_checkpoint(session, edits)
    return CheckpointView.of(pause.info, pause.expires_at)


@checkpoint_router.get("/lens", operation_id="getLens", responses=errors(404, 409))
async def get_lens(session: SessionDep, query: Annotated[LensQuery, Query()], services: ServicesDep) -> LensView:
    """What the model would say if the layers that are left were skipped."""
    layer = session.require_pause(to="read the checkpoint").info.layer
    found = await services.sessions.whitebox.lens(session, query.to_positions(), query.top_k)
    return LensView.of(layer, found, services.tokens)


def _read_activation(content: bytes, info: CheckpointInfo) -> TensorData:
    """The tensor of an uploaded file. What the file says of its place, if anything, must be true of the checkpoint."""
    name, tensor, metadata = read_one(content, param=ACTIVATION)
    if name != ACTIVATION:
        raise FieldOutOfRange.at(ACTIVATION, f"the tensor must have this name, not {name}")
    for key, value in (("layer", info.layer), ("point", info.point), ("first", info.first), ("end", info.end)):
        if metadata.get(key, str(value)) != str(value):
            raise FieldOutOfRange.at(key, f"it is {value} here, not {metadata[key]} as the file says")
    shape = (info.end - info.first, info.hidden_size)
    if tensor.shape != shape:
        raise FieldOutOfRange.at("shape", f"it must be {list(shape)}, not {list(tensor.shape)}")
    if tensor.dtype != info.dtype:
        raise FieldOutOfRange.at("dtype", f"it must be {info.dtype}, not {tensor.dtype}")
    return tensor


def _place(activation: Activation) -> dict[str, int | str]:
    return {"layer": activation.layer, "point": activation.point, "first": activation.first, "end": activation.end}


def _activation_file(activation: Activation) -> bytes:
    place = {name: str(value) for name, value in _place(activation).items()}
    return write_file({ACTIVATION: activation.tensor}, place)


def _activation_json(activation: Activation) -> bytes:
    """What `getActivation` answers in JSON. Its numbers are not worth a Python object each."""
    tensor = activation.tensor
    shown = {**_place(activation), "dtype": tensor.dtype, "values": to_float32(tensor)}
    return orjson.dumps(shown, option=orjson.OPT_SERIALIZE_NUMPY)
