"""`/v1/batches`: requests in a file, done behind everybody else's."""

from typing import Annotated, Any

from fastapi import APIRouter, Query

from app.batches.requests import Batch, BatchBody, BatchesQuery, BatchList
from app.routers.api_calls import IGNORED_DESCRIPTION, IgnoredDep, OpenAIRoute, openai_errors, page_of
from app.routers.dependencies import OwnerDep, ServicesDep

router = APIRouter(prefix="/v1/batches", tags=["openai"], route_class=OpenAIRoute)
ERRORS: dict[int | str, dict[str, Any]] = {**openai_errors(404, 503), 200: {"headers": IGNORED_DESCRIPTION}}


@router.post("", operation_id="createBatch", responses=ERRORS)
async def create_batch(body: BatchBody, services: ServicesDep, owner: OwnerDep, ignored: IgnoredDep) -> Batch:
    """Begin a batch. What is wrong with its file shows in the batch, not here."""
    ignored.read(body)
    return await services.batches.create(owner, body)


@router.get("", operation_id="listBatches", response_model=BatchList, responses=openai_errors())
async def list_batches(
    services: ServicesDep, owner: OwnerDep, query: Annotated[BatchesQuery, Query()]
) -> dict[str, Any]:
    """The caller's batches, in pages."""
    return page_of(services.batches.owned_by(owner), query.after, query.limit)


@router.get("/{batch_id}", operation_id="getBatch", responses=ERRORS)
async def get_batch(batch_id: str, services: ServicesDep, owner: OwnerDep) -> Batch:
    """A batch as it is now."""
    return services.batches.find(owner, batch_id)


@router.post("/{batch_id}/cancel", operation_id="cancelBatch", responses={**ERRORS, **openai_errors(409)})
async def cancel_batch(batch_id: str, services: ServicesDep, owner: OwnerDep) -> Batch:
    """End a batch early. Its files have what was done, and what was not."""
    return await services.batches.cancel(owner, batch_id)
