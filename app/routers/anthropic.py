"""`/v1/messages` and `/v1/messages/count_tokens`."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from app.anthropic.answers import (
    MessageAnswer,
    MessageEvent,
    MessagesErrorBody,
    MessageWriter,
    TokenCount,
    collect,
    stream,
)
from app.anthropic.messages import CountTokensBody, MessagesBody, MessagesQuery, prompt_tokens
from app.openai.models import tokenized_limit
from app.routers.api_calls import BOUND_HEADERS, IGNORED_DESCRIPTION, ApiCallDep, IgnoredDep, OpenAIRoute, check_model
from app.routers.dependencies import OwnerDep, ServicesDep
from app.text.tokenizer import TextLimit
from app.web.openapi import component
from app.web.sse import EventStream, unless_disconnected

router = APIRouter(tags=["anthropic"], route_class=OpenAIRoute)
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": MessagesErrorBody} for status in (400, 401, 403, 404, 413, 429, 500)
}
ANSWERS: dict[int | str, dict[str, Any]] = {
    **REFUSALS,
    **{status: {"model": MessagesErrorBody} for status in (409, 421, 529)},
    200: {
        "description": "The answer; with `stream`, events from `message_start` to `message_stop`.",
        "headers": BOUND_HEADERS,
        "content": {EventStream.media_type: {"schema": component(MessageEvent)}},
    },
}


@router.post("/v1/messages", operation_id="createMessage", response_model=MessageAnswer, responses=ANSWERS)
async def create_message(
    request: Request,
    body: MessagesBody,
    query: Annotated[MessagesQuery, Query()],
    call: ApiCallDep,
    ignored: IgnoredDep,
) -> Response:
    """Go on with a conversation. A client that disconnects cancels its turn."""
    services = call.services
    ignored.read(body)
    check_model(services, body.model)
    support, use = services.tool_support, body.to_tool_use()
    limit = TextLimit("messages", services.info.max_model_len)
    prompt = await services.side_work.run(call.owner, prompt_tokens, body, services.tokens, support, limit)
    choices = await unless_disconnected(request, call.start(body, [prompt], use, user=body.user))
    answer = support.answer(use, has_form=body.to_grammar() is not None)
    writer = MessageWriter(services.info.name, len(prompt), answer, on_calls=call.wait_for_tools)
    if body.stream:
        return call.answer(EventStream(stream(aiter(choices), writer, request.state.request_id)))
    whole = await unless_disconnected(request, collect(aiter(choices), writer))
    return call.answer(Response(whole, media_type="application/json"))


@router.post(
    "/v1/messages/count_tokens",
    operation_id="countMessageTokens",
    response_model=TokenCount,
    responses={**REFUSALS, 200: {"headers": IGNORED_DESCRIPTION}},
)
async def count_message_tokens(
    body: CountTokensBody,
    query: Annotated[MessagesQuery, Query()],
    services: ServicesDep,
    owner: OwnerDep,
    ignored: IgnoredDep,
) -> Any:
    """The tokens that a call with these fields has as its prompt."""
    ignored.read(body)
    check_model(services, body.model)
    limit = tokenized_limit("messages", services.info.max_model_len)
    prompt = await services.side_work.run(owner, prompt_tokens, body, services.tokens, services.tool_support, limit)
    return {"input_tokens": len(prompt)}
