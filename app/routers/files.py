"""`/v1/files`: uploaded in pieces, listed, read, deleted. `/v1/batches` and `/v1/experiments`: requests in a file, many
changes of one prompt, or many prompts, done behind everybody else's turns.
"""

from collections.abc import AsyncGenerator
from contextlib import ExitStack
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import FileResponse

from app.batches.files import DeletedFile, FileFields, FileList, FileObject, FilePurpose, FilesQuery
from app.batches.requests import Batch, BatchBody, BatchesQuery, BatchList
from app.domain.activations import Dictionary, UploadKind
from app.domain.errors import NotFound
from app.experiments.activations import ActivationsBody, ActivationsJob, ActivationsJobs, Wanted
from app.experiments.patching import PatchingBody, PatchingEvent, PatchingResult, PatchingStarted, Sweep, to_file
from app.routers.api_calls import IGNORED_DESCRIPTION, IgnoredDep, OpenAIRoute, openai_errors, page_of
from app.routers.dependencies import OwnerDep, ServicesDep, errors
from app.web.bodies import FILE, OCTET_STREAM, SAFETENSORS, JsonRoute, accepted_types, file_response
from app.web.errors import ANTHROPIC_VERSION, body_of, read_body
from app.web.multipart import read_form
from app.web.openapi import component
from app.web.sse import EventStream, sse_event, unless_disconnected

FILES_PATH = "/v1/files"
MAX_VALUE = 1024
"""Bytes of a field of the form that is no file."""
MAX_FILENAME = 512


def _is_of_openai(request: Request) -> None:
    """Raises `NotFound` for a client of Anthropic's API, which has files of another form on the same path."""
    if ANTHROPIC_VERSION in request.headers:
        raise NotFound("the server keeps no files of Anthropic's API; /v1/files is that of OpenAI's", param="path")


router = APIRouter(prefix=FILES_PATH, tags=["openai"], route_class=OpenAIRoute, dependencies=[Depends(_is_of_openai)])
ERRORS: dict[int | str, dict[str, Any]] = {**openai_errors(404), 200: {"headers": IGNORED_DESCRIPTION}}
FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": [*get_args(FilePurpose)]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
                    },
                }
            }
        },
    }
}


@router.post("", operation_id="createFile", responses={**ERRORS, **openai_errors(503)}, openapi_extra=FORM)
async def create_file(request: Request, services: ServicesDep, owner: OwnerDep, ignored: IgnoredDep) -> FileObject:
    """Keep a file, which comes in a form. It is written to disk while it comes."""
    async with services.files.writing(owner) as writer:
        form = request.headers.get("content-type", ""), request.stream()
        part, fields = await read_form(*form, "file", writer.write, most=MAX_VALUE)
        asked = _read_fields(fields)
        ignored.read(asked)
        ttl_s = None if asked.expires_after is None else asked.expires_after.seconds
        return await writer.keep((part.filename or "file")[:MAX_FILENAME], asked.purpose, ttl_s)


def _read_fields(fields: dict[str, bytes]) -> FileFields:
    """What the form says of the file. Raises `FieldOutOfRange`."""
    given: dict[str, Any] = {}
    for name, value in fields.items():
        text, (outer, _, inner) = value.decode("utf-8", "replace"), name.partition("[")
        if inner.endswith("]"):
            within = given.setdefault(outer, {})
            if isinstance(within, dict):
                within[inner[:-1]] = int(text) if text.isdecimal() and text.isascii() else text
        else:
            given[name] = text
    return read_body(FileFields, given)


@router.get("", operation_id="listFiles", response_model=FileList, responses=openai_errors())
async def list_files(services: ServicesDep, owner: OwnerDep, query: Annotated[FilesQuery, Query()]) -> dict[str, Any]:
    """The caller's files, in pages."""
    files = [each for each in services.files.owned_by(owner) if query.purpose in (None, each.purpose)]
    return page_of(files if query.order == "desc" else files[::-1], query.after, query.limit)


@router.get("/{file_id}", operation_id="getFile", responses=ERRORS)
async def get_file(file_id: str, services: ServicesDep, owner: OwnerDep) -> FileObject:
    """One file, without its content."""
    return services.files.find(owner, file_id)


@router.get(
    "/{file_id}/content",
    operation_id="getFileContent",
    response_class=Response,
    responses={**openai_errors(404), 200: {"content": FILE}},
)
async def get_file_content(file_id: str, services: ServicesDep, owner: OwnerDep) -> Response:
    """The content of a file."""
    file = services.files.find(owner, file_id)
    return FileResponse(services.files.path(file_id), media_type=OCTET_STREAM, filename=file.filename)


@router.delete(
    "/{file_id}", operation_id="deleteFile", response_model=DeletedFile, responses={**ERRORS, **openai_errors(409)}
)
async def delete_file(file_id: str, services: ServicesDep, owner: OwnerDep) -> Any:
    """Delete a file. One that a batch reads stays until that is over."""
    await services.files.delete(owner, file_id)
    return {"id": file_id}


batches_router = APIRouter(prefix="/v1/batches", tags=["openai"], route_class=OpenAIRoute)
BATCH_ERRORS: dict[int | str, dict[str, Any]] = {**openai_errors(404, 503), 200: {"headers": IGNORED_DESCRIPTION}}


@batches_router.post("", operation_id="createBatch", responses=BATCH_ERRORS)
async def create_batch(body: BatchBody, services: ServicesDep, owner: OwnerDep, ignored: IgnoredDep) -> Batch:
    """Begin a batch. What is wrong with its file shows in the batch, not here."""
    ignored.read(body)
    return await services.batches.create(owner, body)


@batches_router.get("", operation_id="listBatches", response_model=BatchList, responses=openai_errors())
async def list_batches(
    services: ServicesDep, owner: OwnerDep, query: Annotated[BatchesQuery, Query()]
) -> dict[str, Any]:
    """The caller's batches, in pages."""
    return page_of(services.batches.owned_by(owner), query.after, query.limit)


@batches_router.get("/{batch_id}", operation_id="getBatch", responses=BATCH_ERRORS)
async def get_batch(batch_id: str, services: ServicesDep, owner: OwnerDep) -> Batch:
    """A batch as it is now."""
    return services.batches.find(owner, batch_id)


@batches_router.post("/{batch_id}/cancel", operation_id="cancelBatch", responses={**BATCH_ERRORS, **openai_errors(409)})
async def cancel_batch(batch_id: str, services: ServicesDep, owner: OwnerDep) -> Batch:
    """End a batch early. Its files have what was done, and what was not."""
    return await services.batches.cancel(owner, batch_id)


experiments_router = APIRouter(prefix="/v1/experiments", tags=["experiments"], route_class=JsonRoute)

PATCHING_ANSWERS: dict[int | str, dict[str, Any]] = {
    **errors(400, 409, 503),
    200: {
        "description": "The whole sweep; with `stream`, events `started`, `row` for each place, and `finished` or "
        "`error`.",
        "content": {EventStream.media_type: {"schema": component(PatchingEvent)}, **FILE},
    },
}


@experiments_router.post(
    "/patching", operation_id="patchActivations", response_model=PatchingResult, responses=PATCHING_ANSWERS
)
async def patch_activations(request: Request, body: PatchingBody, services: ServicesDep, owner: OwnerDep) -> Response:
    """Put activations of one prompt's pass into another's, place by place, and measure the answer each time.

    With `Accept: application/octet-stream` the result is safetensors. A client that disconnects ends the sweep.
    """
    request.state.is_background = True
    sweep = Sweep(services.sessions, services.places, services.tokens, owner)
    await services.side_work.run(owner, sweep.check, body)
    if body.stream:
        return EventStream(_events(sweep))
    await unless_disconnected(request, _run(sweep))
    if accepted_types(request).isdisjoint((OCTET_STREAM, SAFETENSORS)):
        return Response(sweep.result.model_dump_json(), media_type="application/json")
    return file_response(request, to_file(sweep.result))


async def _run(sweep: Sweep) -> None:
    async for _ in sweep.run():
        pass


async def _events(sweep: Sweep) -> AsyncGenerator[bytes, None]:
    """The events of a sweep. An error is an event too: the status has been sent."""
    try:
        async for found in sweep.run():
            name = "started" if isinstance(found, PatchingStarted) else "row"
            yield sse_event(name, found.model_dump_json().encode())
        yield sse_event("finished", sweep.result.model_dump_json().encode())
    except Exception as error:
        yield sse_event("error", body_of(error))


ACTIVATIONS_ANSWERS: dict[int | str, dict[str, Any]] = {
    **errors(400, 404, 409, 503),
    200: {"description": "The job; or the shard of `prompts`, as safetensors.", "content": FILE},
}


@experiments_router.post(
    "/activations", operation_id="readActivations", response_model=ActivationsJob, responses=ACTIVATIONS_ANSWERS
)
async def read_activations(request: Request, body: ActivationsBody, services: ServicesDep, owner: OwnerDep) -> Any:
    """Read what prompts have inside the model: those of a kept file as a job, whose shards are files; a few prompts as
    the answer, a safetensors file. A client that disconnects ends only the latter.
    """
    if body.prompts is None:
        return await services.activation_jobs.create(owner, body)
    request.state.is_background = True
    wanted = Wanted.of(body, services.info, services.uploads, owner)
    with ExitStack() as stack:
        if wanted.features is not None:
            named = services.uploads.get(owner, UploadKind.DICTIONARY, wanted.features.name, Dictionary)
            stack.enter_context(services.uploads.holding(named))
        asking = services.activation_reader.ask(owner, body.prompts, wanted)
        return file_response(request, await unless_disconnected(request, asking))


@experiments_router.get(
    "/activations", operation_id="listActivations", response_model=ActivationsJobs, responses=errors()
)
async def list_activations(
    services: ServicesDep, owner: OwnerDep, query: Annotated[BatchesQuery, Query()]
) -> dict[str, Any]:
    """The caller's jobs, in pages."""
    return page_of(services.activation_jobs.owned_by(owner), query.after, query.limit)


@experiments_router.get("/activations/{job_id}", operation_id="getActivations", responses=errors(404))
async def get_activations(job_id: str, services: ServicesDep, owner: OwnerDep) -> ActivationsJob:
    """A job as it is now. Its shards are read from `/v1/files/{file_id}/content`."""
    return services.activation_jobs.find(owner, job_id)


@experiments_router.post("/activations/{job_id}/cancel", operation_id="cancelActivations", responses=errors(404, 409))
async def cancel_activations(job_id: str, services: ServicesDep, owner: OwnerDep) -> ActivationsJob:
    """End a job early. Its shards stay."""
    return await services.activation_jobs.cancel(owner, job_id)
