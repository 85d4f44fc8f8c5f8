"""`/v1/chat/completions`."""

import asyncio

from fastapi import APIRouter, Request, Response

from app.openai.answers import Head, collect, stream
from app.openai.chat import ChatBody, ChatCompletion
from app.openai.chat_answer import ChatChunkWriter, whole_choice
from app.openai.chat_prompt import chat_prompt
from app.openai.chunks import ChatCompletionEvent
from app.routers.openai.call import OpenAICallDep, check_model, generation_responses
from app.web.json_body import JsonRoute
from app.web.sse import EventStream, unless_disconnected

router = APIRouter(tags=["openai"], route_class=JsonRoute)


@router.post(
    "/v1/chat/completions",
    operation_id="createChatCompletion",
    response_model=ChatCompletion,
    responses=generation_responses(ChatCompletionEvent),
)
async def create_chat_completion(request: Request, body: ChatBody, call: OpenAICallDep) -> Response:
    """Answer a chat. A client that disconnects cancels its turns."""
    services = call.services
    check_model(services, body.model)
    prompt = await asyncio.to_thread(chat_prompt, body.messages, services.tokens)
    choices = await call.start(
        body,
        [prompt],
        prompt_field="messages",
        max_tokens=body.token_limit,
        limit_field=body.limit_field,
        logprobs=body.alternatives,
    )
    writer = ChatChunkWriter(services.tokens, logprobs=body.logprobs)
    head = Head.new("chatcmpl", services.info).fields()
    if body.stream:
        chunk_head = {**head, "object": "chat.completion.chunk"}
        events = stream(
            aiter(choices), writer, chunk_head, n=body.n, prompt_tokens=[len(prompt)], options=body.shown_usage
        )
        return call.answer(EventStream(events))
    entries, usage = await unless_disconnected(request, collect(aiter(choices), writer, n=body.n, count=body.n))
    answer = ChatCompletion(
        **head,
        choices=[whole_choice(index, each) for index, each in enumerate(entries)],
        usage=usage,
        metadata=body.metadata,
    )
    return call.answer(Response(answer.model_dump_json(), media_type="application/json"))
