"""The Python client of OpenAPI Generator runs a session, a pause, its activation, a resume, and each chat API."""

import sys

from standard_client import AnthropicApi, ApiClient, BreakpointsApi, Configuration, OpenaiApi, SessionsApi
from standard_client.models import (
    Action,
    BreakpointBody,
    ChatBody,
    Content,
    EditBody,
    EditBodyPositions,
    EditOp,
    GenerateBody,
    InputItemBody,
    ItemContent,
    Message,
    MessageBody,
    MessageInput,
    MessagesBody,
    ResponseBody,
    ResponseBodyInput,
    ResumeBody,
    ResumeBodyUntil,
    TextBlock,
    UserBlock,
    UserInput,
    UserInputContent,
    UserMessage,
)

with ApiClient(Configuration(host=sys.argv[1])) as client:
    sessions, breakpoints = SessionsApi(client), BreakpointsApi(client)
    openai, anthropic = OpenaiApi(client), AnthropicApi(client)
    session = sessions.create_session()
    armed = breakpoints.create_breakpoint(session.id, BreakpointBody(layer=1, action=Action.PAUSE, once=True))
    assert armed.layers == [1]

    paused = sessions.generate(session.id, GenerateBody(token_ids=[5, 6, 7], max_tokens=4, ignore_eos=True))
    assert (paused.status, paused.checkpoint.layer, paused.finish_reason) == ("paused", 1, None)
    content = breakpoints.get_activation(session.id)
    assert len(content) > paused.checkpoint.bytes
    put = breakpoints.put_activation(session.id, bytes(content))
    assert put.shape == paused.checkpoint.shape

    edits = [EditBody(op=EditOp.SCALE, factor=1.0, positions=EditBodyPositions("last"))]
    finished = breakpoints.resume_session(session.id, ResumeBody(edits=edits, until=ResumeBodyUntil("end")))
    assert (finished.status, len(finished.token_ids), finished.finish_reason) == ("finished", 4, "length")

    model = openai.list_models().data[0].id
    greedy = {"temperature": 0.0, "ignore_eos": True}
    hello = Message(UserMessage(role="user", content=Content("Hello")))
    answer = openai.create_chat_completion(ChatBody(model=model, messages=[hello], max_tokens=4, **greedy))
    assert (answer.usage.completion_tokens, answer.choices[0].message.refusal) == (4, None)
    text = answer.choices[0].message.content
    assert text

    hello = InputItemBody(MessageBody(role="user", content=ItemContent("Hello")))
    body = ResponseBody(model=model, input=ResponseBodyInput([hello]), max_output_tokens=4, **greedy)
    response = openai.create_response(body)
    assert [part.actual_instance.text for part in response.output[0].actual_instance.content] == [text]
    assert openai.get_response(response.id) == response

    hello = UserInput(role="user", content=UserInputContent([UserBlock(TextBlock(type="text", text="Hello"))]))
    body = MessagesBody(model=model, messages=[MessageInput(hello)], max_tokens=4, **greedy)
    message = anthropic.create_message(body)
    assert [block.actual_instance.text for block in message.content] == [text]
