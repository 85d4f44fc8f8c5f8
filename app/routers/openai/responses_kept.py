"""`/v1/responses/{response_id}`: responses that are kept, or are being generated."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from app.domain.errors import FieldOutOfRange, MalformedRequest
from app.openai.responses.encoded import to_json
from app.openai.responses.items import AnyItem
from app.openai.responses.response import DeletedResponse, ItemList, ResponseObject
from app.routers.dependencies import OwnerDep, ServicesDep
from app.routers.openai.route import OpenAIRoute, openai_errors
from app.wire.base import WireModel

router = APIRouter(prefix="/v1/responses/{response_id}", tags=["openai"], route_class=OpenAIRoute)
ERRORS = openai_errors(404, 409, 421)


class ReadQuery(WireModel):
    """How to read a response."""

    model_config = ConfigDict(strict=False)

    stream: bool = Field(False, description="only false: events are not kept")


class ItemsQuery(WireModel):
    """Which items to list."""

    model_config = ConfigDict(strict=False)

    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = Field("desc", description="desc: the last item comes first")
    after: str = Field("", max_length=256, description="id of the item after which the page begins")


@router.get("", operation_id="getResponse", response_model=ResponseObject, responses=ERRORS)
async def get_response(
    response_id: str, services: ServicesDep, owner: OwnerDep, query: Annotated[ReadQuery, Query()]
) -> Response:
    """A response as it is now."""
    if query.stream:
        raise FieldOutOfRange("stream: must be false, the events of a response are not kept", param="stream")
    return _shown(services.responses.find(owner, response_id).answer)


@router.delete("", operation_id="deleteResponse", responses=ERRORS)
async def delete_response(response_id: str, services: ServicesDep, owner: OwnerDep) -> DeletedResponse:
    """Forget a response. Responses that have gone on after it keep its items."""
    if services.responses.find_running(owner, response_id) is not None:
        raise MalformedRequest("the response is being generated: cancel it first", param="response_id")
    response = services.responses.find(owner, response_id)
    services.responses.delete(response)
    await services.responses.settled(response)
    return DeletedResponse(id=response_id)


@router.post("/cancel", operation_id="cancelResponse", response_model=ResponseObject, responses=ERRORS)
async def cancel_response(response_id: str, services: ServicesDep, owner: OwnerDep) -> Response:
    """End a response that is being generated. What it has so far stays."""
    running = services.responses.find_running(owner, response_id)
    if running is None or running[1].ended.is_set():
        status = services.responses.find(owner, response_id).answer.status if running is None else "over"
        raise MalformedRequest(f"the response is {status}: only a running one can be cancelled", param="response_id")
    stored, turn = running
    services.sessions.ends.cancel(stored.conversation.session, turn)
    await turn.ended.wait()
    return _shown(stored.answer.model_copy(update={"status": "cancelled"}))


@router.get("/input_items", operation_id="listResponseInputItems", response_model=ItemList, responses=ERRORS)
async def list_input_items(
    response_id: str, services: ServicesDep, owner: OwnerDep, query: Annotated[ItemsQuery, Query()]
) -> Response:
    """The items of a response's own input, in pages. Those of the responses before it are theirs."""
    items = list(services.responses.find(owner, response_id).input)
    if query.order == "desc":
        items.reverse()
    return _shown(ItemList.page(_after(items, query.after), limit=query.limit))


def _shown(view: BaseModel) -> Response:
    return Response(to_json(view), media_type="application/json")


def _after(items: list[AnyItem], item_id: str) -> list[AnyItem]:
    if not item_id:
        return items
    for index, item in enumerate(items):
        if item.id == item_id:
            return items[index + 1 :]
    raise FieldOutOfRange(f"after: no item {item_id[:100]} in the response's input", param="after")
