"""What a paused turn has left: look at it, change it."""

from functools import partial
from typing import Annotated

import orjson
from fastapi import APIRouter, Query, Request, Response

from app.domain.activations import Activation, CheckpointInfo
from app.domain.breakpoints import TensorData
from app.domain.errors import FieldOutOfRange
from app.routers.breakpoints import large_content
from app.routers.dependencies import CleanupDep, OwnerDep, ServicesDep, SessionDep, errors, errors_of_file
from app.routers.edits import checkpoint_target, to_edits
from app.web.bodies import (
    FILE,
    FILE_BODY,
    OCTET_STREAM,
    SAFETENSORS,
    JsonRoute,
    LargeAnswer,
    accepted_types,
    file_response,
)
from app.wire.checkpoint import (
    ActivationQuery,
    CheckpointView,
    EditCheckpointBody,
    LensQuery,
    LensView,
)
from app.wire.tensors import read_one, to_float32, write_file

router = APIRouter(prefix="/v1/sessions/{session_id}/checkpoint", tags=["breakpoints"], route_class=JsonRoute)

ACTIVATION = "activation"


@router.get("", operation_id="getCheckpoint", responses=errors(404, 409))
async def get_checkpoint(session: SessionDep) -> CheckpointView:
    """Where the session is paused, and until when."""
    pause = session.require_pause(to="read the checkpoint")
    return CheckpointView.of(pause.info, pause.expires_at)


@router.get(
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
    content = await large_content(services, session, cleanup, read, _json if as_json else _file)
    return LargeAnswer(content, media_type="application/json") if as_json else file_response(request, content)


@router.put("/activation", operation_id="putActivation", responses=errors(400, 404, 409, 503), openapi_extra=FILE_BODY)
async def put_activation(request: Request, session: SessionDep, services: ServicesDep) -> CheckpointView:
    """Put another residual stream in the place of this one: a file as `getActivation` gives it for all positions."""
    content = await request.body()
    pause = session.require_pause(to="write the checkpoint")
    tensor = await services.side_work.run(session.owner, _read_activation, content, pause.info)
    await services.sessions.whitebox.write_checkpoint(session, tensor)
    return CheckpointView.of(pause.info, pause.expires_at)


@router.post("/edit", operation_id="editCheckpoint", responses=errors(400, 404, 409, 503))
async def edit_checkpoint(
    session: SessionDep, body: EditCheckpointBody, services: ServicesDep, owner: OwnerDep
) -> CheckpointView:
    """Change the residual stream: every edit, or none if one cannot be made."""
    pause = session.require_pause(to="edit the checkpoint")
    edits = await to_edits(body.edits, services, owner, checkpoint_target(services, pause.info))
    await services.sessions.whitebox.edit_checkpoint(session, edits)
    return CheckpointView.of(pause.info, pause.expires_at)


@router.get("/lens", operation_id="getLens", responses=errors(404, 409))
async def get_lens(session: SessionDep, query: Annotated[LensQuery, Query()], services: ServicesDep) -> LensView:
    """What the model would say if the layers that are left were skipped."""
    layer = session.require_pause(to="read the checkpoint").info.layer
    found = await services.sessions.whitebox.lens(session, query.to_positions(), query.top_k)
    return LensView.of(layer, found, services.tokens)


def _read_activation(content: bytes, info: CheckpointInfo) -> TensorData:
    """The tensor of an uploaded file. What the file says of its place, if anything, must be true of the checkpoint."""
    name, tensor, metadata = read_one(content, param=ACTIVATION)
    if name != ACTIVATION:
        raise FieldOutOfRange(f"{ACTIVATION}: the tensor must have this name, not {name}", param=ACTIVATION)
    for key, value in (("layer", info.layer), ("point", info.point), ("first", info.first), ("end", info.end)):
        if metadata.get(key, str(value)) != str(value):
            raise FieldOutOfRange(f"{key}: it is {value} here, not {metadata[key]} as the file says", param=key)
    shape = (info.end - info.first, info.hidden_size)
    if tensor.shape != shape:
        raise FieldOutOfRange(f"shape: it must be {list(shape)}, not {list(tensor.shape)}", param="shape")
    if tensor.dtype != info.dtype:
        raise FieldOutOfRange(f"dtype: it must be {info.dtype}, not {tensor.dtype}", param="dtype")
    return tensor


def _place(activation: Activation) -> dict[str, int | str]:
    return {"layer": activation.layer, "point": activation.point, "first": activation.first, "end": activation.end}


def _file(activation: Activation) -> bytes:
    place = {name: str(value) for name, value in _place(activation).items()}
    return write_file({ACTIVATION: activation.tensor}, place)


def _json(activation: Activation) -> bytes:
    """What `getActivation` answers in JSON. Its numbers are not worth a Python object each."""
    tensor = activation.tensor
    shown = {**_place(activation), "dtype": tensor.dtype, "values": to_float32(tensor)}
    return orjson.dumps(shown, option=orjson.OPT_SERIALIZE_NUMPY)
