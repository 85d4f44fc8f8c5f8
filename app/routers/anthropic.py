"""`/v1/messages` and `/v1/messages/count_tokens`."""

from functools import partial
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
from app.anthropic.messages import (
    OF_PREFIXES,
    OF_THOUGHTS,
    CountTokensBody,
    MessagesBody,
    MessagesQuery,
    PromptFields,
    message_prompt,
)
from app.openai.models import tokenized_limit
from app.routers.api_calls import (
    BOUND_HEADERS,
    IGNORED_DESCRIPTION,
    ApiCallDep,
    IgnoredDep,
    OpenAIRoute,
    told_of,
)
from app.routers.dependencies import OwnerDep, ServicesDep
from app.text.tokenizer import TextLimit
from app.tools.support import ToolSupport
from app.tools.thinking import Heeded
from app.web.openapi import component
from app.web.sse import EventStream, unless_disconnected
from app.wire.calls import IgnoredFields

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
) -> Response:
    """Go on with a conversation. A client that disconnects cancels its turn."""
    services = call.services
    support = services.tool_support
    heeded = _heed(body, call.ignored, support)
    info = call.choose(body.model)
    body = services.threads.resume(call.owner, body)
    use = body.to_tool_use()
    limit, variables = TextLimit("messages", services.info.max_model_len), heeded.variables
    side_work = services.side_work
    seal = support.seal.of(call.owner)
    prompt = await side_work.run(call.owner, message_prompt, body, services.tokens, support, seal, variables, limit)
    prompt = await call.go_on(body, prompt)
    options: Any = {"user": body.user, "opening": prompt.opening, "budget": heeded.budget}
    options["prefix_ends"] = prompt.prefix_ends
    choices = await unless_disconnected(request, call.start(body, [prompt.token_ids], use, **options))
    writer = MessageWriter(
        {"model": info.name, **told_of(prompt)},
        len(prompt.token_ids),
        support.answer(use, has_form=body.to_grammar() is not None, opening=prompt.opening, streams=body.stream),
        on_calls=call.wait_for_tools,
        seal=seal,
        shows_thoughts=body.shows_thoughts,
        thinks=support.thinking is not None,
    )
    keep = None if body.thread is None else partial(services.threads.keep, call.owner, body)
    if body.stream:
        return call.answer(EventStream(stream(aiter(choices), writer, request.state.request_id, keep)))
    whole = await unless_disconnected(request, collect(aiter(choices), writer, keep))
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
    support = services.tool_support
    variables = _heed(body, ignored, support).variables
    services.sessions.adapters.get(body.model)
    limit = tokenized_limit("messages", services.info.max_model_len)
    seal = support.seal.of(owner)
    prompt = await services.side_work.run(owner, message_prompt, body, services.tokens, support, seal, variables, limit)
    return {"input_tokens": len(prompt.token_ids)}


def _heed(body: PromptFields, ignored: IgnoredFields, support: ToolSupport) -> Heeded:
    """What the model does of what the call says of thinking; the rest of the body's fields without effect are told."""
    heeded = support.heed(body.wish())
    ignored.add(heeded.ignored)
    of_prefixes = OF_PREFIXES if support.keeps_states else frozenset()
    ignored.read(body, of_prefixes | (OF_THOUGHTS if support.reads_thoughts else frozenset()))
    return heeded
