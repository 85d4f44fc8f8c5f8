"""`/v1/responses`: generated, kept, cancelled."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

from app.domain.errors import FieldOutOfRange, MalformedRequest, NotFound
from app.openai.response import (
    CompactedResponse,
    DeletedResponse,
    InputTokens,
    ItemList,
    ResponseObject,
    Shortened,
    StoredResponse,
)
from app.openai.response_events import CANCELLED_EVENT, LAST_EVENTS
from app.openai.response_input import CompactBody, CountBody, MessageBody, ResponseBody
from app.openai.response_items import AnyItem, CompactionItem, InputMessageItem, OutputMessageItem, new_id, to_json
from app.openai.response_store import UnstoredConversation
from app.openai.shapes import ResponseEvent
from app.routers.api_calls import (
    BOUND_HEADERS,
    IGNORED_DESCRIPTION,
    ApiCall,
    ApiCallDep,
    OpenAIRoute,
    openai_errors,
    page_of,
    with_session,
)
from app.routers.dependencies import OwnerDep, Services, ServicesDep
from app.routers.response_call import ResponseRun, asked_of, start_response
from app.sessions.keyed import KeyedRequest
from app.web.openapi import component
from app.web.sse import EventStream, sse_event, unless_disconnected
from app.wire.base import QueryModel

router = APIRouter(tags=["openai"], route_class=OpenAIRoute)
ANSWERS: dict[int | str, dict[str, Any]] = {
    **openai_errors(404, 409, 421, 429, 503),
    200: {
        "description": "The response; with `stream`, the events of the Responses API, each with its name.",
        "headers": BOUND_HEADERS,
        "content": {EventStream.media_type: {"schema": component(ResponseEvent)}},
    },
}


@router.post("/v1/responses", operation_id="createResponse", response_model=ResponseObject, responses=ANSWERS)
async def create_response(request: Request, body: ResponseBody, call: ApiCallDep) -> Response:
    """Generate a response. A client that disconnects cancels it, unless it runs in the background."""
    services, keyed = call.services, call.keyed
    if keyed is not None and (made := _made_before(services, keyed)) is not None:
        return _again(services, made, keyed, stream=body.stream)
    if body.background:
        return await _in_background(request, body, call)
    unstored = UnstoredConversation(services.sessions)
    call.cleanup.callback(unstored.close)
    runs: list[ResponseRun] = []
    if not body.stream and keyed is None:
        call.cleanup.callback(_forget_unheard, services, runs)
    run = await unless_disconnected(request, start_response(call, unstored, body))
    runs.append(run)
    if body.stream:
        return _with_session(run, EventStream(_stream(run, keyed)))
    await unless_disconnected(request, _finish(run))
    runs.clear()
    if keyed is not None:
        keyed.is_answered = True
    return _with_session(run, Response(to_json(run.response), media_type="application/json"))


async def _in_background(request: Request, body: ResponseBody, call: ApiCall) -> Response:
    """Begin a response that goes on without its client. Its turn has a place in the queue when this answers."""
    services, keyed = call.services, call.keyed
    async with AsyncExitStack() as undo:
        own = replace(call, cleanup=await undo.enter_async_context(AsyncExitStack()))
        run = await unless_disconnected(request, start_response(own, UnstoredConversation(services.sessions), body))
        await services.responses.settled(run.stored)
        followed = services.background.begin(run.response.id, run.events(), undo.pop_all())
    if keyed is not None:
        keyed.is_done, keyed.is_answered = True, not body.stream
    if body.stream:
        return _with_session(run, EventStream(followed.events()))
    return _with_session(run, shown(run.response))


SUMMARIES = "cmp_"
"""What the ids of messages begin with that hold earlier summaries."""
COMPACT = (
    "Write a summary of this conversation for an assistant who goes on with it, and who reads only the summary and the "
    "user's messages. Say what was asked, decided, done and found out, and what is left to do. Write only the summary."
)


@router.post(
    "/v1/responses/compact",
    operation_id="compactResponse",
    response_model=CompactedResponse,
    responses=openai_errors(404, 409, 421, 429, 503),
)
async def compact_response(request: Request, body: CompactBody, call: ApiCallDep) -> Response:
    """Shorten a conversation: the model writes a summary of it. Nothing of it is kept.

    If the context has no room for the conversation and a summary, the oldest items are left out. So are the oldest
    messages of the user if all would take more than half of the context.
    """
    # A summary calls no tools, and is not kept.
    refused = {"tool_choice": body.tool_choice not in (None, "none"), "store": body.store}
    call.ignored.add(name for name, asks in refused.items() if asks and name in body.model_fields_set)
    told = MessageBody(role="user", content=COMPACT)
    given = [MessageBody(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    if body.input == "":
        if body.previous_response_id is None and body.conversation is None:
            raise FieldOutOfRange.at("input", "there is nothing to shorten")
        given = []
    asked = body.model_copy(update={"input": [*given, told], "store": False, "tool_choice": "none"})
    unstored = UnstoredConversation(call.services.sessions)
    call.cleanup.callback(unstored.close)
    call.is_aside = True  # its session closes with it
    run = await unless_disconnected(request, start_response(call, unstored, asked))
    before = run.stored.context[:-1]
    await unless_disconnected(request, _finish(run))
    response = run.response
    said = [part.text for item in response.output if isinstance(item, OutputMessageItem) for part in item.content]
    if response.status != "completed" or not "".join(said).strip():
        # A higher limit helps where the context has room: else that was full, or the model said nothing.
        used = 0 if response.usage is None else response.usage.total_tokens
        is_cut = response.status == "incomplete" and used < call.services.info.max_model_len
        advice = ", or ask again with a higher max_output_tokens" if is_cut else ""
        raise MalformedRequest(
            f"the model wrote no whole summary: its response is {response.status}. Keep the items{advice}",
            param="max_output_tokens" if is_cut else "input",
        )
    summary = call.services.tool_support.seal.of(call.owner).close("".join(said))
    users = [
        item
        for item in before
        if isinstance(item, InputMessageItem) and item.role == "user" and not item.id.startswith(SUMMARIES)
    ]
    services, shortened = call.services, None
    if run.left_out:
        shortened = Shortened(left_out=run.left_out)
        users = await services.side_work.run(call.owner, _newest, users, services)
    return shown(
        CompactedResponse(
            id=response.id,
            created_at=response.created_at,
            output=[*users, CompactionItem(id=new_id("cmp"), encrypted_content=summary)],
            usage=response.usage,
            djinn=shortened,
        )
    )


@router.post(
    "/v1/responses/input_tokens",
    operation_id="countInputTokens",
    response_model=InputTokens,
    responses={**openai_errors(404, 409, 421, 429, 503), 200: {"headers": IGNORED_DESCRIPTION}},
)
async def count_input_tokens(body: CountBody, call: ApiCallDep) -> Any:
    """The tokens that a response with these fields has as its prompt."""
    asked = await asked_of(call, UnstoredConversation(call.services.sessions), body)
    return {"input_tokens": len(asked.prompt.token_ids)}


def _newest(users: Sequence[InputMessageItem], services: Services) -> list[InputMessageItem]:
    """The last messages of the user that together take at most half of the context."""
    room, kept = services.info.max_model_len // 2, list[InputMessageItem]()
    for item in reversed(users):
        text = "\n".join(part.text for part in item.content)
        room -= len(services.tokens.encode(text, add_special_tokens=False))
        if room < 0:
            break
        kept.insert(0, item)
    return kept


def _forget_unheard(services: Services, runs: list[ResponseRun]) -> None:
    """Forget a response whose client went before it heard the id: no call can ask for it, nor continue it."""
    for run in runs:
        conversation, registry = run.stored.conversation, services.sessions
        if not conversation.is_kept or run.response.status != "cancelled" or run.response.usage is not None:
            continue  # a response with its usage was over before: another call has cancelled it
        services.responses.delete(run.stored)
        session = conversation.session
        if not conversation.responses and conversation.owns_session and registry.table.find(session.id) is session:
            registry.drop(session)  # its turn may still be ending


async def _stream(run: ResponseRun, keyed: KeyedRequest | None) -> AsyncGenerator[bytes, None]:
    async with aclosing(run.events()) as events:
        async for event in events:
            yield sse_event(event["type"], orjson.dumps(event))
    if keyed is not None and run.error is None:
        keyed.is_answered = True


def _made_before(services: Services, keyed: KeyedRequest) -> StoredResponse | None:
    """The response that the request has made when it came first; None: there is none."""
    if not keyed.is_done or keyed.response is None:
        return None
    try:
        return services.responses.find(keyed.owner, keyed.response)
    except NotFound:  # the server died when the turn was kept, but not yet the response
        keyed.is_done = False
        return None


def _again(services: Services, made: StoredResponse, keyed: KeyedRequest, *, stream: bool) -> Response:
    """Answer a retry with the response that is kept. It has fewer events than one that is generated."""
    keyed.is_answered = True
    answer = EventStream(_events_of(services, made)) if stream else shown(made.answer)
    return with_session(answer, made.conversation.session)


def _events_of(services: Services, made: StoredResponse, first: int = 0) -> AsyncGenerator[bytes, None]:
    """Those of a response that is over, or runs in the background, from a number on."""
    followed = services.background.find(made.answer.id)
    return _events_again(made.answer, first) if followed is None else followed.events(first)


async def _events_again(response: ResponseObject, first: int = 0) -> AsyncGenerator[bytes, None]:
    whole = orjson.Fragment(to_json(response))
    events: list[dict[str, Any]] = [{"type": "response.created", "response": whole}]
    for index, item in enumerate(response.output):
        fields = {"output_index": index, "item": orjson.Fragment(to_json(item))}
        events += [{"type": f"response.output_item.{what}", **fields} for what in ("added", "done")]
    events.append({"type": LAST_EVENTS.get(response.status, CANCELLED_EVENT), "response": whole})
    first = min(first, len(events) - 1)
    for number, event in enumerate(events[first:], first):
        yield sse_event(event["type"], orjson.dumps({**event, "sequence_number": number}))


async def _finish(run: ResponseRun) -> None:
    """Read the response to its end. Raises the error of one that failed."""
    async with aclosing(run.events()) as events:
        async for _ in events:
            pass
    if run.error is not None:
        raise run.error


def _with_session(run: ResponseRun, answer: Response) -> Response:
    return answer if run.session is None else with_session(answer, run.session)


kept_router = APIRouter(prefix="/v1/responses/{response_id}", tags=["openai"], route_class=OpenAIRoute)
ERRORS = openai_errors(404, 409, 421)


class ReadQuery(QueryModel):
    """How to read a response."""

    stream: bool = Field(False, description="answer with events: those of its items, and its last one")
    starting_after: int | None = Field(
        None, ge=0, description="with stream: leaves out the events up to this number, but for the last"
    )


class ItemsQuery(QueryModel):
    """Which items to list."""

    limit: int = Field(20, ge=0, le=100)
    order: Literal["asc", "desc"] = Field("desc", description="desc: the last item comes first")
    after: str = Field("", max_length=256, description="id of the item after which the page begins")


@kept_router.get("", operation_id="getResponse", response_model=ResponseObject, responses={**ERRORS, 200: ANSWERS[200]})
async def get_response(
    response_id: str, services: ServicesDep, owner: OwnerDep, query: Annotated[ReadQuery, Query()]
) -> Response:
    """A response as it is now; with `stream`, one that is over or runs in the background as events."""
    found = services.responses.find(owner, response_id)
    if not query.stream:
        return shown(found.answer)
    if not found.answer.background and services.responses.find_running(owner, response_id) is not None:
        raise FieldOutOfRange.at(
            "stream", "false while the response runs, which only its own call can follow: it is not in the background"
        )
    first = 0 if query.starting_after is None else query.starting_after + 1
    return EventStream(_events_of(services, found, first))


@kept_router.delete("", operation_id="deleteResponse", response_model=DeletedResponse, responses=ERRORS)
async def delete_response(response_id: str, services: ServicesDep, owner: OwnerDep) -> Any:
    """Forget a response. Responses that have gone on after it keep its items."""
    if services.responses.find_running(owner, response_id) is not None:
        raise MalformedRequest("the response is being generated: cancel it first", param="response_id")
    response = services.responses.find(owner, response_id)
    services.responses.delete(response)
    services.background.forget(response_id)
    await services.responses.settled(response)
    return {"id": response_id}


@kept_router.post("/cancel", operation_id="cancelResponse", response_model=ResponseObject, responses=ERRORS)
async def cancel_response(response_id: str, services: ServicesDep, owner: OwnerDep) -> Response:
    """End a response that is being generated. What it has so far stays. One in the background may be over already."""
    running, found = services.responses.find_running(owner, response_id), services.responses.find(owner, response_id)
    if running is not None and not running[1].ended.is_set():
        services.sessions.pauses.cancel(found.conversation.session, running[1])
        await running[1].ended.wait()
    elif not found.answer.background:
        status = found.answer.status if running is None else "over"
        raise MalformedRequest(f"the response is {status}: only a running one can be cancelled", param="response_id")
    if not found.answer.background:
        return shown(found.answer.model_copy(update={"status": "cancelled"}))
    followed = services.background.find(response_id)
    if followed is not None:
        await followed.is_over.wait()
    return shown(found.answer)


@kept_router.get("/input_items", operation_id="listResponseInputItems", response_model=ItemList, responses=ERRORS)
async def list_input_items(
    response_id: str, services: ServicesDep, owner: OwnerDep, query: Annotated[ItemsQuery, Query()]
) -> Response:
    """The items of a response's own input, in pages. Those of the responses before it are theirs."""
    return shown(items_page(services.responses.find(owner, response_id).input, query, "the response's input"))


def shown(view: BaseModel) -> Response:
    """The view, which may have encoded parts."""
    return Response(to_json(view), media_type="application/json")


def items_page(items: Sequence[AnyItem], query: ItemsQuery, where: str) -> Any:
    """The page that is asked for. Raises `FieldOutOfRange` if it is to begin after an item that is not `where`."""
    ordered = list(items if query.order == "asc" else reversed(items))
    return ItemList.model_construct(**page_of(ordered, query.after, query.limit, where))
