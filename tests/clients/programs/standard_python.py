"""What OpenAPI Generator makes for Python: a session, a pause, its activation down and up, a resume and a chat."""

import sys

from standard_client import ApiClient, BreakpointsApi, Configuration, OpenaiApi, SessionsApi
from standard_client.models import (
    Action,
    BreakpointBody,
    ChatBody,
    Content,
    EditBody,
    EditBodyPositions,
    EditOp,
    GenerateBody,
    Message,
    ResumeBody,
    ResumeBodyUntil,
    UserMessage,
)

with ApiClient(Configuration(host=sys.argv[1])) as client:
    sessions, breakpoints, openai = SessionsApi(client), BreakpointsApi(client), OpenaiApi(client)
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
    said = Message(UserMessage(role="user", content=Content("Hello")))
    answer = openai.create_chat_completion(ChatBody(model=model, messages=[said], max_tokens=4, ignore_eos=True))
    assert (answer.usage.completion_tokens, answer.choices[0].message.refusal) == (4, None)
