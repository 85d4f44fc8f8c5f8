"""What clients upload to look inside the model, by name: vectors, dictionaries, lenses and probes."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Query, Request, Response
from numpy.typing import NDArray
from pydantic import BaseModel

from app.domain.activations import Dictionary, StoredFile, StoredProbe, Translators, Uploaded, UploadKey, UploadKind
from app.domain.breakpoints import TensorData
from app.domain.errors import FieldOutOfRange, TooLarge
from app.routers.dependencies import OwnerDep, Services, ServicesDep, errors
from app.sessions.side_work import FILE_BYTES_PER_S, Lane
from app.web.bodies import FILE, FILE_BODY, file_response
from app.web.errors import read_body
from app.web.multipart import read_form
from app.web.openapi import REF
from app.wire.breakpoints import VectorList, VectorQuery, VectorView
from app.wire.dictionaries import CONFIG, WEIGHTS, DictionaryFields, DictionaryList, DictionaryView, read_dictionary
from app.wire.probes import (
    NamedLensFields,
    NamedLensList,
    NamedLensView,
    NamedProbeList,
    NamedProbeView,
    ProbeFields,
    read_lens,
    read_probe,
)
from app.wire.tensors import read_one, write_file

Read = tuple[Callable[[StoredFile], Uploaded], Mapping[str, NDArray[np.float32]]]
"""What is known of an upload but for its file, and the tensors of that."""

vectors_router = APIRouter(prefix="/v1/vectors", tags=["breakpoints"])

VECTOR = "vector"


@vectors_router.post(
    "", operation_id="createVector", status_code=201, responses=errors(400, 503), openapi_extra=FILE_BODY
)
async def create_vector(
    request: Request, query: Annotated[VectorQuery, Query()], services: ServicesDep, owner: OwnerDep
) -> VectorView:
    """Keep a vector under a name: a safetensors file with one tensor `[size]`, whose size is up to the width of the
    model's widest point. It takes the place of another one of that name; edits that were sent before keep the old one.
    """
    content = await request.body()
    widest = max(shape.width for shapes in services.info.points.values() for shape in shapes if shape)
    vector = await services.side_work.run(owner, _read_vector, content, widest)
    await services.uploads.put_vector(owner, query.name, vector)
    return VectorView.of(query.name, vector)


@vectors_router.get("", operation_id="listVectors", response_model=VectorList, responses=errors())
async def list_vectors(services: ServicesDep, owner: OwnerDep) -> Any:
    """The caller's vectors."""
    found = services.uploads.owned_by(owner, UploadKind.VECTOR)
    return {"data": [VectorView.of(name, vector) for name, vector in found.items()]}


@vectors_router.get(
    "/{name}", operation_id="getVector", response_class=Response, responses={**errors(404), 200: {"content": FILE}}
)
async def get_vector(request: Request, name: str, services: ServicesDep, owner: OwnerDep) -> Response:
    """A vector as safetensors: one tensor `vector`."""
    return file_response(
        request, write_file({VECTOR: services.uploads.get(owner, UploadKind.VECTOR, name, TensorData)})
    )


@vectors_router.delete("/{name}", operation_id="deleteVector", status_code=204, responses=errors(404))
async def delete_vector(name: str, services: ServicesDep, owner: OwnerDep) -> None:
    """Forget a vector. Edits that were sent before keep it."""
    await services.uploads.delete(owner, UploadKind.VECTOR, name)


def _read_vector(content: bytes, widest: int) -> TensorData:
    _, vector, _ = read_one(content, param=VECTOR)
    if len(vector.shape) != 1 or not 1 <= vector.shape[0] <= widest:
        shape = list(vector.shape)
        raise FieldOutOfRange.at("shape", f"it must be one number of numbers, [1] to [{widest}], not {shape}")
    return vector


DICTIONARIES_PATH = "/v1/dictionaries"
MAX_FIELD = 1 << 16
"""Bytes of a field of a form that is not the weights."""
FILE_PART = {"type": "string", "format": "binary"}


def _form(fields: type[BaseModel], *small: str) -> dict[str, Any]:
    """How the document describes a form with `fields`, the file `weights`, and `small` files."""
    described = fields.model_json_schema(ref_template=f"{REF}{{model}}")
    schema = {
        "type": "object",
        "required": ["name", WEIGHTS],
        "properties": {**described["properties"], **dict.fromkeys((*small, WEIGHTS), FILE_PART)},
        "$defs": described.get("$defs", {}),
    }
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


async def _create(
    request: Request,
    services: Services,
    owner: str | None,
    kind: UploadKind,
    form: type[BaseModel],
    read: Callable[..., Read],
    *small: str,
) -> tuple[str, Any]:
    """Keep what a form has: its file `weights`, its fields, and its `small` files (None: it is not there), as `read`
    makes sense of them in a thread, for this model; returns the upload's name, and what is known of it.

    Raises `TooLarge` for more than `max_upload_bytes`, what `read` and `Uploads.put` do, and what forms do.
    """
    uploads, written = services.uploads, 0
    with uploads.part() as part:
        with part.open("wb") as opened:

            async def write(piece: bytes) -> None:
                nonlocal written
                written += len(piece)
                if written > uploads.most:
                    raise TooLarge(f"{WEIGHTS}: at most {uploads.most} bytes, max_upload_bytes")
                opened.write(piece)

            content_type = request.headers.get("content-type", "")
            _, values = await read_form(content_type, request.stream(), WEIGHTS, write, most=MAX_FIELD)
        files = [values.pop(name, None) for name in small]
        asked: Any = read_body(form, {name: each.decode("utf-8", "replace") for name, each in values.items()})
        async with services.side_work.turn(owner, Lane.FILE) as piece:
            piece.seconds = written / FILE_BYTES_PER_S
            make, tensors = await asyncio.to_thread(read, part, asked, services.info, *files)
    return asked.name, await uploads.put(UploadKey(owner, kind, asked.name), make, tensors)


dictionaries_router = APIRouter(prefix=DICTIONARIES_PATH, tags=["breakpoints"])


@dictionaries_router.post(
    "",
    operation_id="createDictionary",
    status_code=201,
    responses=errors(400, 503),
    openapi_extra=_form(DictionaryFields, CONFIG),
)
async def create_dictionary(request: Request, services: ServicesDep, owner: OwnerDep) -> DictionaryView:
    """Keep a dictionary under a name: a form with the files of a SAELens folder, `cfg` (its `cfg.json`) and `weights`
    (its safetensors), or with Gemma Scope's `params.npz` as `weights` and the `layer` that it is for. It takes the
    place of another one of that name; edits that were sent before keep the old one.
    """
    read = partial(read_dictionary, room=services.uploads.most)
    made = await _create(request, services, owner, UploadKind.DICTIONARY, DictionaryFields, read, CONFIG)
    return DictionaryView.of(*made, loaded=True)


@dictionaries_router.get("", operation_id="listDictionaries", response_model=DictionaryList, responses=errors())
async def list_dictionaries(services: ServicesDep, owner: OwnerDep) -> Any:
    """The caller's dictionaries."""
    found = services.uploads.owned_by(owner, UploadKind.DICTIONARY)
    return {"data": [_dictionary(name, each, services) for name, each in found.items()]}


@dictionaries_router.get("/{name}", operation_id="getDictionary", responses=errors(404))
async def get_dictionary(name: str, services: ServicesDep, owner: OwnerDep) -> DictionaryView:
    """What a dictionary is, without its numbers."""
    return _dictionary(name, services.uploads.get(owner, UploadKind.DICTIONARY, name, Dictionary), services)


@dictionaries_router.delete(
    "/{name}", operation_id="deleteDictionary", status_code=204, responses=errors(404, 409, 503)
)
async def delete_dictionary(name: str, services: ServicesDep, owner: OwnerDep) -> None:
    """Forget a dictionary. Edits that were sent before keep what they need of it."""
    await services.uploads.delete(owner, UploadKind.DICTIONARY, name)


def _dictionary(name: str, found: Dictionary, services: Services) -> DictionaryView:
    return DictionaryView.of(name, found, loaded=services.uploads.is_loaded(found))


LENSES_PATH = "/v1/lenses"
lenses_router = APIRouter(prefix=LENSES_PATH, tags=["breakpoints"])


@lenses_router.post(
    "",
    operation_id="createNamedLens",
    status_code=201,
    responses=errors(400, 503),
    openapi_extra=_form(NamedLensFields),
)
async def create_named_lens(request: Request, services: ServicesDep, owner: OwnerDep) -> NamedLensView:
    """Keep a lens under a name: a form with `weights`, a safetensors file with `0.weight` `[hidden_size, hidden_size]`
    and, if there is one, `0.bias` for the stream after layer 0, and so on for the layers that it has. It takes the
    place of another one of that name.
    """
    made = await _create(request, services, owner, UploadKind.LENS, NamedLensFields, read_lens)
    return NamedLensView.of(*made, loaded=True)


@lenses_router.get("", operation_id="listNamedLenses", response_model=NamedLensList, responses=errors())
async def list_named_lenses(services: ServicesDep, owner: OwnerDep) -> Any:
    """The caller's lenses."""
    found, is_loaded = services.uploads.owned_by(owner, UploadKind.LENS), services.uploads.is_loaded
    return {"data": [NamedLensView.of(name, each, loaded=is_loaded(each)) for name, each in found.items()]}


@lenses_router.get("/{name}", operation_id="getNamedLens", responses=errors(404))
async def get_named_lens(name: str, services: ServicesDep, owner: OwnerDep) -> NamedLensView:
    """What a lens is, without its numbers."""
    found = services.uploads.get(owner, UploadKind.LENS, name, Translators)
    return NamedLensView.of(name, found, loaded=services.uploads.is_loaded(found))


@lenses_router.delete("/{name}", operation_id="deleteNamedLens", status_code=204, responses=errors(404, 503))
async def delete_named_lens(name: str, services: ServicesDep, owner: OwnerDep) -> None:
    """Forget a lens."""
    await services.uploads.delete(owner, UploadKind.LENS, name)


PROBES_PATH = "/v1/probes"
probes_router = APIRouter(prefix=PROBES_PATH, tags=["breakpoints"])


@probes_router.post(
    "",
    operation_id="createProbe",
    status_code=201,
    responses=errors(400, 503),
    openapi_extra=_form(ProbeFields),
)
async def create_probe(request: Request, services: ServicesDep, owner: OwnerDep) -> NamedProbeView:
    """Keep a probe under a name: a form with `weights`, a safetensors file with `weight` `[1, width]` and `bias` `[1]`,
    or with the tensors of a `torch.nn.Sequential` of Linear, ReLU and Linear. It takes the place of another one of that
    name; breakpoints that were armed before keep the old one.
    """
    made = await _create(request, services, owner, UploadKind.PROBE, ProbeFields, read_probe)
    return NamedProbeView.of(*made)


@probes_router.get("", operation_id="listProbes", response_model=NamedProbeList, responses=errors())
async def list_probes(services: ServicesDep, owner: OwnerDep) -> Any:
    """The caller's probes."""
    found = services.uploads.owned_by(owner, UploadKind.PROBE)
    return {"data": [NamedProbeView.of(name, each) for name, each in found.items()]}


@probes_router.get("/{name}", operation_id="getProbe", responses=errors(404))
async def get_probe(name: str, services: ServicesDep, owner: OwnerDep) -> NamedProbeView:
    """What a probe is, without its numbers."""
    return NamedProbeView.of(name, services.uploads.get(owner, UploadKind.PROBE, name, StoredProbe))


@probes_router.delete("/{name}", operation_id="deleteProbe", status_code=204, responses=errors(404, 503))
async def delete_probe(name: str, services: ServicesDep, owner: OwnerDep) -> None:
    """Forget a probe. Breakpoints that were armed before keep it."""
    await services.uploads.delete(owner, UploadKind.PROBE, name)
