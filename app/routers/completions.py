"""`/v1/chat/completions` and `/v1/completions`, the models, and their tokens."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import chain, starmap
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from app.domain.values import ModelInfo
from app.openai.answers import ChatChunkWriter, collect, head_of, stream, whole_choice, whole_json, with_readings
from app.openai.chat import ChatBody, chat_prompt
from app.openai.completions import CompletionBody, CompletionChunkWriter, Echo, whole_continuation
from app.openai.models import (
    DefaultSampling,
    DetokenizeAnswer,
    DetokenizeBody,
    LoadModelBody,
    Model,
    ModelList,
    TokenizeAnswer,
    TokenizeBody,
    UnloadedModel,
    UnloadModelBody,
    tokenized_limit,
)
from app.openai.shapes import ChatCompletion, ChatCompletionEvent, Completion, CompletionEvent
from app.routers.api_calls import (
    IGNORED_DESCRIPTION,
    ApiCallDep,
    IgnoredDep,
    OpenAIRoute,
    as_model,
    generation_responses,
    openai_errors,
    told_of,
)
from app.routers.dependencies import OperatorOnlyDep, OwnerDep, Services, ServicesDep, errors
from app.sessions.adapters import ServedAdapter
from app.text.generation import Detokenizer, begun_character
from app.text.tokenizer import TextLimit, Tokens
from app.tools.thinking import Wish
from app.web.bodies import JsonRoute
from app.web.errors import ANTHROPIC_VERSION
from app.web.sse import EventStream, unless_disconnected
from app.wire.base import check_token_ids

router = APIRouter(tags=["openai"], route_class=OpenAIRoute)
operators_router = APIRouter(
    prefix="/v1/models", tags=["system"], route_class=JsonRoute, dependencies=[OperatorOnlyDep]
)


@router.post(
    "/v1/chat/completions",
    operation_id="createChatCompletion",
    response_model=ChatCompletion,
    responses=generation_responses(ChatCompletionEvent),
)
async def create_chat_completion(request: Request, body: ChatBody, call: ApiCallDep) -> Response:
    """Answer a chat. A client that disconnects cancels its turns."""
    services = call.services
    support = services.tool_support
    heeded = support.heed(body.wish())
    call.ignored.add(heeded.ignored)
    call.ignored.read(body)
    info = call.choose(body.model)
    use = body.to_tool_use()
    limit, variables = TextLimit("messages", services.info.max_model_len), heeded.variables
    prompt = await services.side_work.run(
        call.owner,
        chat_prompt,
        (message.for_template() for message in body.messages),  # read on the worker thread
        services.tokens,
        support,
        use.tools,
        variables=variables,
        limit=limit,
    )
    call.ignored.add(prompt.left_out)
    prompt = await call.go_on(body, prompt)
    options: Any = {"user": body.user, "opening": prompt.opening, "budget": heeded.budget}
    options["prefix_ends"] = prompt.prefix_ends
    starting = call.start(body, [prompt.token_ids], use, n=body.n, **options)
    choices = await unless_disconnected(request, starting)
    has_form = body.to_grammar() is not None
    writer = ChatChunkWriter(
        services.tokens,
        logprobs=body.logprobs,
        new_answer=partial(support.answer, use, has_form=has_form, opening=prompt.opening, streams=body.stream),
        thinks=support.thinking is not None,
        on_calls=call.wait_for_tools,
    )
    head = head_of("chatcmpl", info) | told_of(prompt)
    if body.stream:
        head["object"], lengths = "chat.completion.chunk", [len(prompt.token_ids)]
        events = stream(aiter(choices), writer, head, n=body.n, prompt_tokens=lengths, options=body.shown_usage)
        return call.answer(EventStream(events))
    entries, usage = await unless_disconnected(request, collect(aiter(choices), writer, n=body.n, count=body.n))
    head["object"] = "chat.completion"
    whole = starmap(whole_choice, enumerate(entries))
    answer = await whole_json(with_readings(head, usage.readings), whole, usage=usage.total(), metadata=body.metadata)
    return call.answer(Response(answer, media_type="application/json"))


@router.post(
    "/v1/completions",
    operation_id="createCompletion",
    response_model=Completion,
    responses=generation_responses(CompletionEvent),
)
async def create_completion(request: Request, body: CompletionBody, call: ApiCallDep) -> Response:
    """Go on with each prompt. A client that disconnects cancels its turns."""
    services = call.services
    call.ignored.read(body)
    info = call.choose(body.model)
    prompts = await services.side_work.run(call.owner, _encode, body.prompts, services.tokens, services.info)
    starting = call.start(
        body,
        [prompt.token_ids for prompt in prompts],
        body.to_tool_use(),
        n=body.n,
        user=body.user,
    )
    choices = await unless_disconnected(request, starting)
    writer = CompletionChunkWriter(
        services.tokens,
        n=body.n,
        echoes=prompts if body.echo else None,
        logprobs=body.logprobs is not None,
        token_ids=body.return_token_ids,
    )
    head = head_of("cmpl", info) | {"object": "text_completion"}
    if body.stream:
        lengths = [len(prompt.token_ids) for prompt in prompts]
        events = stream(aiter(choices), writer, head, n=body.n, prompt_tokens=lengths, options=body.shown_usage)
        return call.answer(EventStream(events))
    entries, usage = await unless_disconnected(
        request, collect(aiter(choices), writer, n=body.n, count=len(prompts) * body.n)
    )
    whole = (whole_continuation(index, each, token_ids=body.return_token_ids) for index, each in enumerate(entries))
    answer = await whole_json(with_readings(head, usage.readings), whole, usage=usage.total())
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
            # A character that the prompt only begins comes with the answer, which completes it.
            is_whole = not begun_character(tokens, prompt)
            text = tokens.decode(prompt) if is_whole else Detokenizer(tokens, after_text=False).push(prompt)
            encoded.append(Echo(text, tuple(prompt)))
    return encoded


ANSWERS = {**openai_errors(404), 200: {"headers": IGNORED_DESCRIPTION}}
LISTED = {**openai_errors(), 200: {"headers": IGNORED_DESCRIPTION}}


@router.post("/tokenize", operation_id="tokenize", responses=ANSWERS)
async def tokenize(body: TokenizeBody, services: ServicesDep, owner: OwnerDep, ignored: IgnoredDep) -> TokenizeAnswer:
    """The tokens that a prompt or a chat becomes."""
    ignored.read(body)
    services.sessions.adapters.get(body.model)
    answer, left_out = await services.side_work.run(owner, _tokenize, body, services)
    ignored.add(left_out)
    return answer


@router.post("/detokenize", operation_id="detokenize", response_model=DetokenizeAnswer, responses=ANSWERS)
async def detokenize(body: DetokenizeBody, services: ServicesDep, owner: OwnerDep, ignored: IgnoredDep) -> Any:
    """The text of tokens."""
    ignored.read(body)
    services.sessions.adapters.get(body.model)
    check_token_ids(body.tokens, services.info.vocab_size, param="tokens")
    text = await services.side_work.run(owner, services.tokens.decode, body.tokens, skip_special_tokens=False)
    return {"prompt": text}


def _tokenize(body: TokenizeBody, services: Services) -> tuple[TokenizeAnswer, Iterable[str]]:
    """The answer, and the fields of messages that the chat template leaves out."""
    left_out: Iterable[str] = ()
    tokens, limit = services.tokens, tokenized_limit(body.input_field, services.info.max_model_len)
    if body.messages is None:
        assert body.prompt is not None
        token_ids = tokens.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False, limit=limit)
    else:
        continues = bool(body.continue_final_message)
        heeded = services.tool_support.heed(Wish(body.chat_template_kwargs or {}, body.reasoning_effort))
        prompt = chat_prompt(
            (message.for_template() for message in body.messages),
            tokens,
            services.tool_support,
            [tool.function.to_tool() for tool in body.tools or ()],
            add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continues,
            variables=heeded.variables,
            limit=limit,
        )
        token_ids, left_out = prompt.token_ids, chain(heeded.ignored, prompt.left_out)
    answer = TokenizeAnswer(
        count=len(token_ids),
        max_model_len=services.info.max_model_len,
        tokens=token_ids,
        token_strs=[tokens.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None,
    )
    return answer, left_out


@router.get("/v1/models", operation_id="listModels", response_model=ModelList, responses=LISTED)
async def list_models(request: Request, services: ServicesDep) -> Any:
    """The served models. With the header `anthropic-version`, as Anthropic's API lists them."""
    if ANTHROPIC_VERSION in request.headers:
        adapters = [(as_model(services.info, each), each.since) for each in services.sessions.adapters]
        data = [_anthropic_model(*each) for each in ((services.info, services.started_at), *adapters)]
        ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
        return JSONResponse({"data": data, "has_more": False, **ends})
    names = [_model(services, name) for name in services.sessions.adapters.names]
    return {"data": [*names, *(_adapter(services, each) for each in services.sessions.adapters)]}


@router.get("/v1/models/{model:path}", operation_id="getModel", response_model=Model, responses=ANSWERS)
async def get_model(model: str, request: Request, services: ServicesDep) -> Model | Response:
    """One served model. Its name may hold slashes. With the header `anthropic-version`, as Anthropic's API has it."""
    found = services.sessions.adapters.get(model)
    if ANTHROPIC_VERSION in request.headers:
        if found is not None:
            return JSONResponse(_anthropic_model(as_model(services.info, found), found.since))
        return JSONResponse(_anthropic_model(services.info, services.started_at))
    return _model(services, model) if found is None else _adapter(services, found)


def _adapter(services: Services, served: ServedAdapter) -> Model:
    """An adapter, as vLLM lists one, without the place of its files: that is the operator's."""
    base = _model(services, served.adapter.name)
    changed = {"created": served.since, "root": served.adapter.digest, "parent": services.info.name}
    return base.model_copy(update=changed)


def _model(services: Services, name: str) -> Model:
    info = services.info
    return Model(
        id=name,
        root=info.name,
        created=services.started_at,
        max_model_len=info.max_model_len,
        layers=info.num_layers,
        hidden_size=info.hidden_size,
        chat_format=services.tool_support.format_name,
        default_sampling=DefaultSampling.model_validate(services.sampling),
    )


def _anthropic_model(info: ModelInfo, loaded_at: int) -> dict[str, Any]:
    """The model as Anthropic's API has it, which the server loaded at `loaded_at`, in Unix seconds."""
    return {
        "type": "model",
        "id": info.name,
        "display_name": info.name,
        "created_at": datetime.fromtimestamp(loaded_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": info.max_model_len,
        "lifecycle": "active",
    }


@operators_router.post("/load", operation_id="loadModel", responses=errors(400, 409, 503))
async def load_model(body: LoadModelBody, services: ServicesDep) -> Model:
    """Load a LoRA adapter, which all tenants may name from then on. Only an operator may."""
    return _adapter(services, await services.sessions.adapters.load(body.name, body.path))


@operators_router.post(
    "/unload", operation_id="unloadModel", response_model=UnloadedModel, responses=errors(400, 404, 409, 503)
)
async def unload_model(body: UnloadModelBody, services: ServicesDep) -> Any:
    """Unload a LoRA adapter that no turn uses. Its sessions stay, and go on once the same files are loaded again. Only
    an operator may.
    """
    await services.sessions.adapters.unload(body.name)
    return {"id": body.name}
