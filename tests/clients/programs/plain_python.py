"""The client of openapi-python-client runs a session, a pause with its activation, a resume, and each chat API."""

import sys
from io import BytesIO

from plain_client import Client
from plain_client.api.anthropic import create_message
from plain_client.api.breakpoints import create_breakpoint, get_activation, put_activation, resume_session
from plain_client.api.openai import create_chat_completion, create_response, get_response, list_models
from plain_client.api.sessions import create_session, generate
from plain_client.models import (
    Action,
    BreakpointBody,
    ChatBody,
    EditBody,
    EditOp,
    GenerateBody,
    MessageBody,
    MessageBodyRole,
    MessagesBody,
    ResponseBody,
    ResumeBody,
    TextBlock,
    UserInput,
    UserMessage,
)
from plain_client.types import File

client = Client(base_url=sys.argv[1])
session = create_session.sync(client=client)
armed = create_breakpoint.sync(session.id, client=client, body=BreakpointBody(layer=1, action=Action.PAUSE, once=True))
assert armed.layers == [1]

paused = generate.sync(session.id, client=client, body=GenerateBody(token_ids=[5, 6, 7], max_tokens=4, ignore_eos=True))
assert (paused.status, paused.checkpoint.layer, paused.finish_reason) == ("paused", 1, None)
content = get_activation.sync(session.id, client=client).payload.read()
assert len(content) > paused.checkpoint.bytes_
put = put_activation.sync(session.id, client=client, body=File(payload=BytesIO(content)))
assert put.shape == paused.checkpoint.shape

edits = [EditBody(op=EditOp.SCALE, factor=1.0, positions="last")]
finished = resume_session.sync(session.id, client=client, body=ResumeBody(edits=edits, until="end"))
assert (finished.status, len(finished.token_ids), finished.finish_reason) == ("finished", 4, "length")

model = list_models.sync(client=client).data[0].id
greedy = {"temperature": 0.0, "ignore_eos": True}
body = ChatBody(model=model, messages=[UserMessage(role="user", content="Hello")], max_tokens=4, **greedy)
answer = create_chat_completion.sync(client=client, body=body)
assert (answer.usage.completion_tokens, answer.choices[0].message.refusal) == (4, None)
text = answer.choices[0].message.content
assert text

hello = MessageBody(role=MessageBodyRole.USER, content="Hello")
body = ResponseBody(model=model, input_=[hello], max_output_tokens=4, **greedy)
response = create_response.sync(client=client, body=body)
assert [part.text for part in response.output[0].content] == [text]
assert get_response.sync(response.id, client=client) == response

hello = UserInput(role="user", content=[TextBlock(type_="text", text="Hello")])
body = MessagesBody(model=model, messages=[hello], max_tokens=4, **greedy)
message = create_message.sync(client=client, body=body)
assert [block.text for block in message.content] == [text]
