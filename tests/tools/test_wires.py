"""Calls of tools as each API tells them, whole and streamed, wherever the answer is cut."""

import json
from typing import Any

import pytest

from app.anthropic.answers import MessageWriter, whole_message
from app.domain.values import NEUTRAL, FinishReason, Ticket, TurnUsage
from app.messages import TurnFinished
from app.openai.answers import ChatChunkWriter, whole_choice
from app.openai.response import ResponseObject
from app.openai.response_events import ResponseWriter
from app.openai.response_input import ResponseBody
from app.text.generation import TextChunk
from app.tools.definitions import HERMES, LLAMA, MISTRAL, ToolFormat
from app.tools.reader import Answer, FamilyReader
from tests.tools.calls import TOOLS, write

Told = tuple[str, list[tuple[str, str]], str]
"""Content, calls with their arguments, and why the answer ended."""


def items(text: str, piece: int, reason: FinishReason) -> list[Any]:
    chunks = [TextChunk(text[start : start + piece]) for start in range(0, len(text), piece)]
    return [*chunks, TurnFinished(Ticket(1), reason, TurnUsage(1, 0, 9, 0), 10)]


def new_answer(form: ToolFormat) -> Answer:
    return Answer(FamilyReader(form, TOOLS))


async def chat(form: ToolFormat, answer: list[Any]) -> Told:
    tokens: Any = None
    writer = ChatChunkWriter(tokens, logprobs=False, new_answer=lambda: new_answer(form), on_calls=lambda names: None)
    choice = whole_choice(0, [entry for item in answer for entry in await writer.entries(0, item)])
    calls = [call["function"] for call in choice["message"].get("tool_calls", ())]
    told = [(call["name"], call["arguments"]) for call in calls]
    return choice["message"]["content"] or "", told, choice["finish_reason"]


def messages(form: ToolFormat, answer: list[Any]) -> Told:
    writer = MessageWriter("tiny", 1, new_answer(form), on_calls=lambda names: None)
    blocks = whole_message([event for item in answer for event in writer.events(item)])
    calls = [(each["name"], json.dumps(each["input"])) for each in blocks["content"] if each["type"] == "tool_use"]
    content = "".join(each["text"] for each in blocks["content"] if each["type"] == "text")
    return content, calls, blocks["stop_reason"]


def responses(form: ToolFormat, answer: list[Any]) -> Told:
    body = ResponseBody.model_validate({"model": "m", "input": "x"})
    tokens: Any = None
    response = ResponseObject.begin(body, body.to_params(NEUTRAL), "resp_1", 1)
    writer = ResponseWriter(response, tokens, new_answer(form))
    for item in answer:
        list(writer.write(item) if isinstance(item, TextChunk) else writer.finish(item))
    made: list[Any] = list(writer.response.output)
    calls = [(item.name, item.arguments) for item in made if item.type == "function_call"]
    content = "".join(part.text for item in made if item.type == "message" for part in item.content)
    return content, calls, writer.response.status


@pytest.mark.parametrize(
    ("form", "before", "arguments"),
    [
        (HERMES, "Let me look: 1 < 2.\n", '{"text": "l1\nl2 \\"<tool_call>"}'),
        (HERMES, "", json.dumps('{"text": "x"}')),
        (MISTRAL, "So [1]. ", '{"text": "l1\n"}'),
        (LLAMA, "", '{"text": "l1\tl2", "n": [1, {}]}'),
    ],
    ids=["hermes", "text", "mistral", "llama"],
)
async def test_wherever_an_answer_is_cut_all_apis_tell_the_same(form: ToolFormat, before: str, arguments: str) -> None:
    text = before + write(form, ("edit", arguments))
    for end in range(1, len(text) + 1):
        reason = FinishReason.STOP if end == len(text) else FinishReason.LENGTH
        whole, streamed = items(text[:end], end, reason), items(text[:end], 1, reason)
        content, calls, told = await chat(form, whole)
        assert await chat(form, streamed) == (content, calls, told), end
        assert messages(form, whole) == messages(form, streamed), end
        assert responses(form, whole) == responses(form, streamed) == (content, calls, responses(form, whole)[2]), end
        assert messages(form, whole)[0] == content
        assert [name for name, _ in messages(form, whole)[1]] == [name for name, _ in calls] == ["edit"] * len(calls)
        assert before.startswith(content), (end, content)
        assert told == ("length" if end < len(text) else "tool_calls")
    value = json.loads(arguments, strict=False)
    assert json.loads(calls[0][1]) == (json.loads(value) if isinstance(value, str) else value)
    assert json.loads(messages(form, whole)[1][0][1]) == json.loads(calls[0][1])
