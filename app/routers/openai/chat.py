"""`/v1/chat/completions`."""

from functools import partial
from itertools import starmap

from fastapi import APIRouter, Request, Response

from app.openai.answers import Head, collect, stream, whole_json
from app.openai.chat import ChatBody, ChatCompletion
from app.openai.chat_answer import ChatChunkWriter, whole_choice
from app.openai.chat_prompt import chat_prompt
from app.openai.chunks import ChatCompletionEvent
from app.routers.openai.call import OpenAICallDep, check_model, generation_responses
from app.routers.openai.route import IgnoredDep, OpenAIRoute
from app.text.token_lengths import TextLimit
from app.web.sse import EventStream, unless_disconnected

router = APIRouter(tags=["openai"], route_class=OpenAIRoute)


@router.post(
    "/v1/chat/completions",
    operation_id="createChatCompletion",
    response_model=ChatCompletion,
    responses=generation_responses(ChatCompletionEvent),
)
async def create_chat_completion(
    request: Request, body: ChatBody, call: OpenAICallDep, ignored: IgnoredDep
) -> Response:
    """Answer a chat. A client that disconnects cancels its turns."""
    services = call.services
    ignored.read(body)
    check_model(services, body.model)
    use, support = body.to_tool_use(), services.tool_support
    limit = TextLimit("messages", services.info.max_model_len)
    prompt = await services.side_work.run(
        call.owner, chat_prompt, body.messages, services.tokens, support, use.tools, limit=limit
    )
    ignored.add(prompt.left_out)
    starting = call.start(
        body,
        [prompt.token_ids],
        n=body.n,
        user=body.user,
        prompt_field="messages",
        max_tokens=body.token_limit,
        limit_field=body.limit_field,
        logprobs=body.alternatives,
        grammar=body.to_turn_grammar(use, support),
        shown=support.shown if use.callable else frozenset(),
    )
    choices = await unless_disconnected(request, starting)
    writer = ChatChunkWriter(
        services.tokens,
        logprobs=body.logprobs,
        new_reader=partial(support.reader, use, has_form=body.to_grammar() is not None),
        on_calls=call.wait_for_tools,
    )
    head = Head.new("chatcmpl", services.info).fields()
    if body.stream:
        chunk_head = {**head, "object": "chat.completion.chunk"}
        events = stream(
            aiter(choices),
            writer,
            chunk_head,
            n=body.n,
            prompt_tokens=[len(prompt.token_ids)],
            options=body.shown_usage,
        )
        return call.answer(EventStream(events))
    entries, usage = await unless_disconnected(request, collect(aiter(choices), writer, n=body.n, count=body.n))
    head["object"] = "chat.completion"
    whole = starmap(whole_choice, enumerate(entries))
    answer = await whole_json(head, whole, usage=usage.model_dump(), metadata=body.metadata)
    return call.answer(Response(answer, media_type="application/json"))
