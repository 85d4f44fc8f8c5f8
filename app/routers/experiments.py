"""`/v1/experiments`: many changes of one prompt, or many prompts, behind everybody else's turns."""

from collections.abc import AsyncGenerator
from contextlib import ExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from app.batches.requests import BatchesQuery
from app.domain.uploads import Dictionary, UploadKind
from app.experiments.activations import ActivationsBody, ActivationsJob, ActivationsJobs, Wanted
from app.experiments.patching import PatchingBody, PatchingEvent, PatchingResult, PatchingStarted, Sweep, to_file
from app.routers.api_calls import page_of
from app.routers.dependencies import OwnerDep, ServicesDep, errors
from app.web.bodies import FILE, OCTET_STREAM, SAFETENSORS, JsonRoute, accepted_types, file_response
from app.web.errors import body_of
from app.web.openapi import component
from app.web.sse import EventStream, sse_event, unless_disconnected

router = APIRouter(prefix="/v1/experiments", tags=["experiments"], route_class=JsonRoute)

PATCHING_ANSWERS: dict[int | str, dict[str, Any]] = {
    **errors(400, 409, 503),
    200: {
        "description": "The whole sweep; with `stream`, events `started`, `row` for each place, and `finished` or "
        "`error`.",
        "content": {EventStream.media_type: {"schema": component(PatchingEvent)}, **FILE},
    },
}


@router.post("/patching", operation_id="patchActivations", response_model=PatchingResult, responses=PATCHING_ANSWERS)
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


@router.post(
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


@router.get("/activations", operation_id="listActivations", response_model=ActivationsJobs, responses=errors())
async def list_activations(
    services: ServicesDep, owner: OwnerDep, query: Annotated[BatchesQuery, Query()]
) -> dict[str, Any]:
    """The caller's jobs, in pages."""
    return page_of(services.activation_jobs.owned_by(owner), query.after, query.limit)


@router.get("/activations/{job_id}", operation_id="getActivations", responses=errors(404))
async def get_activations(job_id: str, services: ServicesDep, owner: OwnerDep) -> ActivationsJob:
    """A job as it is now. Its shards are read from `/v1/files/{file_id}/content`."""
    return services.activation_jobs.find(owner, job_id)


@router.post("/activations/{job_id}/cancel", operation_id="cancelActivations", responses=errors(404, 409))
async def cancel_activations(job_id: str, services: ServicesDep, owner: OwnerDep) -> ActivationsJob:
    """End a job early. Its shards stay."""
    return await services.activation_jobs.cancel(owner, job_id)
