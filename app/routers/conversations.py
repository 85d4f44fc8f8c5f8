"""`/v1/conversations`: items that a client keeps here, and to which responses add their own."""

from typing import Annotated, Any, ClassVar, Literal, Self

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, Field

from app.domain.errors import ContextTooLong, FieldOutOfRange, MalformedRequest, NotFound
from app.domain.homes import new_response_id
from app.openai.response import (
    CONVERSATION,
    Conversation,
    ItemList,
    ResponseObject,
    StoredResponse,
    check_calls,
)
from app.openai.response_input import ForeignBody, InputItemBody, ResponseBody
from app.openai.response_items import AnyItem, Item
from app.routers.api_calls import IgnoredDep, OpenAIRoute, openai_errors, page_of
from app.routers.dependencies import OwnerDep, Services, ServicesDep
from app.routers.response_call import prompt_of
from app.routers.responses import ItemsQuery, items_page, shown
from app.sessions.named import IDLE_TTL_S
from app.sessions.session import OF_RESPONSES
from app.tools.definitions import ToolUse
from app.wire.base import LongList, deleted_shape
from app.wire.calls import RESPONSES, IgnoredFields, OpenBody
from app.wire.sessions import Metadata

MOST_ITEMS = 20
"""That come at a time, as in OpenAI's API."""
PATH = "/v1/conversations"
ITEM = "/{conversation_id}/items/{item_id:path}"
"""Clients choose ids of items: some have a slash."""
router = APIRouter(prefix=PATH, tags=["openai"], route_class=OpenAIRoute)
ERRORS = openai_errors(404, 409, 421)
Items = Annotated[LongList[InputItemBody], Field(max_length=MOST_ITEMS)]


class CreateConversationBody(OpenBody):
    """A new conversation."""

    place: ClassVar[str] = RESPONSES

    items: Items = Field(default=[], description="what it begins with")
    metadata: Metadata | None = Field(None, description="the caller's own labels")


class UpdateConversationBody(OpenBody):
    """Other labels, in the place of those that it had."""

    metadata: Metadata | None


class AddItemsBody(OpenBody):
    """Items for the end of a conversation."""

    place: ClassVar[str] = RESPONSES

    items: Items = Field(min_length=1)


class ConversationView(BaseModel):
    """A conversation."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]

    @classmethod
    def of(cls, head: StoredResponse) -> Self:
        """The conversation as it is now."""
        metadata = head.conversation.session.metadata
        return cls(id=head.answer.id, created_at=head.answer.created_at, metadata=metadata)


DeletedConversation = deleted_shape(
    "DeletedConversation", "A conversation that the server has forgotten.", "conversation.deleted"
)


@router.post("", operation_id="createConversation", responses=openai_errors(404, 429, 503))
async def create_conversation(
    body: CreateConversationBody, services: ServicesDep, owner: OwnerDep, ignored: IgnoredDep
) -> ConversationView:
    """Open a conversation, with a session for its responses."""
    items = await _items(services, owner, body, ignored)
    session = services.sessions.create(owner, metadata=body.metadata or {}, ttl_s=IDLE_TTL_S, name=OF_RESPONSES)
    name = new_response_id(services.settings.replica, prefix=CONVERSATION)
    head = ResponseObject.of_items(name, services.info.name)
    services.responses.put_items(Conversation(name, session, is_kept=True), items, head)
    found = services.responses.find_conversation(owner, name)
    await services.responses.settled(found)
    return ConversationView.of(found)


@router.get("/{conversation_id}", operation_id="getConversation", responses=ERRORS)
async def get_conversation(conversation_id: str, services: ServicesDep, owner: OwnerDep) -> ConversationView:
    """A conversation as it is now."""
    return ConversationView.of(services.responses.find_conversation(owner, conversation_id))


@router.post("/{conversation_id}", operation_id="updateConversation", responses=ERRORS)
async def update_conversation(
    conversation_id: str, body: UpdateConversationBody, services: ServicesDep, owner: OwnerDep, ignored: IgnoredDep
) -> ConversationView:
    """Give a conversation other labels."""
    ignored.read(body)
    head = services.responses.find_conversation(owner, conversation_id)
    session = head.conversation.session
    session.relabel(body.metadata or {})
    services.sessions.keeper.note(session)
    await services.responses.settled(head)
    return ConversationView.of(head)


@router.delete(
    "/{conversation_id}", operation_id="deleteConversation", response_model=DeletedConversation, responses=ERRORS
)
async def delete_conversation(conversation_id: str, services: ServicesDep, owner: OwnerDep) -> Any:
    """Forget a conversation, its items and its responses."""
    head = services.responses.find_conversation(owner, conversation_id)
    head.conversation.require_rest()
    services.responses.forget(head.conversation)
    await services.responses.settled(head)
    return {"id": conversation_id}


@router.post(
    "/{conversation_id}/items", operation_id="createConversationItems", response_model=ItemList, responses=ERRORS
)
async def add_items(
    conversation_id: str, body: AddItemsBody, services: ServicesDep, owner: OwnerDep, ignored: IgnoredDep
) -> Response:
    """Add items to the end of a conversation. Returns them."""
    head = services.responses.find_conversation(owner, conversation_id)
    items = await _items(services, owner, body, ignored, head.conversation)
    conversation = services.responses.find_conversation(owner, conversation_id).conversation
    answer = ResponseObject.of_items(new_response_id(services.settings.replica), services.info.name)
    services.responses.put_items(conversation, items, answer)
    await services.responses.settled(head)
    return shown(ItemList.model_construct(**page_of(items, None, MOST_ITEMS)))


@router.get("/{conversation_id}/items", operation_id="listConversationItems", response_model=ItemList, responses=ERRORS)
async def list_items(
    conversation_id: str, services: ServicesDep, owner: OwnerDep, query: Annotated[ItemsQuery, Query()]
) -> Response:
    """The items of a conversation, in pages."""
    conversation = services.responses.find_conversation(owner, conversation_id).conversation
    return shown(items_page(conversation.left_of(conversation.items), query, "the conversation"))


@router.get(ITEM, operation_id="getConversationItem", response_model=Item, responses=ERRORS)
async def get_item(conversation_id: str, item_id: str, services: ServicesDep, owner: OwnerDep) -> Response:
    """One item of a conversation."""
    head = services.responses.find_conversation(owner, conversation_id)
    return shown(_item(head.conversation, item_id))


@router.delete(ITEM, operation_id="deleteConversationItem", responses=ERRORS)
async def delete_item(conversation_id: str, item_id: str, services: ServicesDep, owner: OwnerDep) -> ConversationView:
    """Remove an item from a conversation. Its response, if it has one, still shows it."""
    head = services.responses.find_conversation(owner, conversation_id)
    head.conversation.require_rest()
    services.responses.remove_item(head, _item(head.conversation, item_id).id)
    await services.responses.settled(head)
    return ConversationView.of(head)


def _item(conversation: Conversation, item_id: str) -> AnyItem:
    for item in conversation.left_of(conversation.items):
        if item.id == item_id:
            return item
    raise NotFound(f"no item {item_id[:100]} in the conversation", param="item_id")


async def _items(
    services: Services,
    owner: str | None,
    body: CreateConversationBody | AddItemsBody,
    ignored: IgnoredFields,
    conversation: Conversation | None = None,
) -> list[AnyItem]:
    """The items that a body brings for the end of the conversation. Raises `FieldOutOfRange`, `NotFound`, and
    `ContextTooLong` if no response could go on after them.
    """
    ignored.read(body)
    seal = services.tool_support.seal.of(owner)
    foreign = (
        index for index, item in enumerate(body.items) if isinstance(item, ForeignBody) and not item.to_item(seal)
    )
    ignored.add(f"items.{index}" for index in foreign)
    call = ResponseBody.model_construct(model=services.info.name, input=body.items)
    items = call.items(lambda item_id: services.responses.find_item(owner, item_id, param="items"), seal)
    before = [] if conversation is None else conversation.left_of(conversation.items)
    if items:
        await services.side_work.run(owner, _check_room, services, call, [*before, *items])
    if conversation is not None:
        conversation.require_rest()
        conversation.check_not_removed(items, param="items")
        before = conversation.left_of(conversation.items)
    check_calls(before, items, param="items")
    known = {item.id for item in before}
    for item in items:
        if item.id in known:
            raise FieldOutOfRange.at("items", f"the conversation has an item {item.id[:100]}")
        known.add(item.id)
    return items


def _check_room(services: Services, call: ResponseBody, items: list[AnyItem]) -> None:
    try:
        prompt, _ = prompt_of(services, call, items, ToolUse(), {})
        services.sessions.turns.room(len(prompt.token_ids), None, param="items")
    except ContextTooLong as error:
        error.param = "items"
        raise
    except (MalformedRequest, FieldOutOfRange):  # a response brings what its template misses
        return
