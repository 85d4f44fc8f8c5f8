"""`/v1/completions`."""

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from app.domain.values import ModelInfo
from app.openai.answers import Head, collect, stream, whole_json
from app.openai.chunks import CompletionEvent
from app.openai.completions.answer import CompletionChunkWriter, Echo, whole_choice
from app.openai.completions.body import Completion, CompletionBody
from app.routers.openai.call import OpenAICallDep, check_model, generation_responses
from app.routers.openai.route import IgnoredDep, OpenAIRoute
from app.text.token_lengths import TextLimit
from app.text.tokenizer import Tokens
from app.web.sse import EventStream, unless_disconnected
from app.wire.base import check_token_ids

router = APIRouter(tags=["openai"], route_class=OpenAIRoute)


@router.post(
    "/v1/completions",
    operation_id="createCompletion",
    response_model=Completion,
    responses=generation_responses(CompletionEvent),
)
async def create_completion(
    request: Request, body: CompletionBody, call: OpenAICallDep, ignored: IgnoredDep
) -> Response:
    """Go on with each prompt. A client that disconnects cancels its turns."""
    services = call.services
    ignored.read(body)
    check_model(services, body.model)
    prompts = await services.side_work.run(call.owner, _encode, body.prompts, services.tokens, services.info)
    starting = call.start(
        body,
        [prompt.token_ids for prompt in prompts],
        n=body.n,
        user=body.user,
        prompt_field="prompt",
        max_tokens=body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    choices = await unless_disconnected(request, starting)
    writer = CompletionChunkWriter(
        services.tokens,
        n=body.n,
        echoes=prompts if body.echo else None,
        logprobs=body.logprobs is not None,
        token_ids=body.return_token_ids,
    )
    head = Head.new("cmpl", services.info).fields() | {"object": "text_completion"}
    if body.stream:
        lengths = [len(prompt.token_ids) for prompt in prompts]
        events = stream(aiter(choices), writer, head, n=body.n, prompt_tokens=lengths, options=body.shown_usage)
        return call.answer(EventStream(events))
    entries, usage = await unless_disconnected(
        request, collect(aiter(choices), writer, n=body.n, count=len(prompts) * body.n)
    )
    whole = (whole_choice(index, each, token_ids=body.return_token_ids) for index, each in enumerate(entries))
    answer = await whole_json(head, whole, usage=usage.model_dump())
    return call.answer(Response(answer, media_type="application/json"))


def _encode(prompts: Sequence[str | list[int]], tokens: Tokens, info: ModelInfo) -> list[Echo]:
    encoded = []
    for index, prompt in enumerate(prompts):
        field = "prompt" if len(prompts) == 1 else f"prompt.{index}"
        if isinstance(prompt, str):
            limit = TextLimit(field, info.max_model_len)
            encoded.append(Echo(prompt, tuple(tokens.encode(prompt, add_special_tokens=True, limit=limit))))
        else:
            check_token_ids(prompt, info.vocab_size, param=field)
            encoded.append(Echo(tokens.decode(prompt), tuple(prompt)))
    return encoded
