"""Calls of tools as each API tells them, whole and streamed, wherever the answer is cut."""

import json
from typing import Any, cast

import pytest

from app.anthropic.answers import MessageWriter, whole_message
from app.domain.values import NEUTRAL, FinishReason, Ticket, TurnUsage
from app.messages import TurnFinished
from app.openai.answers import ChatChunkWriter, whole_choice
from app.openai.response import ResponseObject
from app.openai.response_events import ResponseWriter
from app.openai.response_input import ResponseBody
from app.text.generation import TextChunk
from app.text.tokenizer import Tokens
from app.tools.definitions import HERMES, LLAMA, MISTRAL, ToolFormat
from app.tools.reader import Answer, FamilyReader
from tests.tools.calls import TOOLS, write


async def tell(form: ToolFormat, text: str, piece: int, *, cut: bool) -> list[Any]:
    """What chats, messages and responses tell of an answer that comes in pieces of so many characters: each its
    content, its calls and why it ended.
    """
    reason = FinishReason.LENGTH if cut else FinishReason.STOP
    end = TurnFinished(Ticket(1), reason, TurnUsage(1, 0, 9, 0), 10)
    items: list[Any] = [*(TextChunk(text[start : start + piece]) for start in range(0, len(text), piece)), end]
    body, tokens = ResponseBody.model_validate({"model": "m", "input": "x"}), cast("Tokens", None)
    answers = [Answer(FamilyReader(form, TOOLS)) for _ in range(3)]
    chat = ChatChunkWriter(tokens, logprobs=False, new_answer=lambda: answers[0], on_calls=lambda names: None)
    choice = whole_choice(0, [entry for item in items for entry in await chat.entries(0, item)])
    functions = [call["function"] for call in choice["message"].get("tool_calls", ())]
    message = MessageWriter("tiny", 1, answers[1], on_calls=lambda names: None)
    whole = whole_message([event for item in items for event in message.events(item)])
    says, uses = ([each for each in whole["content"] if each["type"] == kind] for kind in ("text", "tool_use"))
    begun = ResponseObject.begin(body, body.to_params(NEUTRAL), "resp_1", 1)
    response = ResponseWriter(begun, tokens, answers[2])
    events = [event for item in items[:-1] for event in response.write(item)] + list(response.finish(end))
    made = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    said = [part["text"] for item in made if item["type"] == "message" for part in item["content"]]
    called = [(item["name"], item["arguments"]) for item in made if item["type"] == "function_call"]
    told = [(each["name"], each["arguments"]) for each in functions]
    return [
        (choice["message"]["content"] or "", told, choice["finish_reason"]),
        (
            "".join(each["text"] for each in says),
            [(each["name"], each["input"]) for each in uses],
            whole["stop_reason"],
        ),
        ("".join(said), called, begun.status),
    ]


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
        told = await tell(form, text[:end], end, cut=end < len(text))
        assert told == await tell(form, text[:end], 1, cut=end < len(text)), end
        chat, message, response = told
        assert before.startswith(chat[0]), end
        assert chat[0] == message[0] == response[0]
        assert chat[1] == response[1]
        ends = ("length", "max_tokens", "incomplete") if end < len(text) else ("tool_calls", "tool_use", "completed")
        assert (chat[2], message[2], response[2]) == ends
        assert [name for name, _ in message[1]] == [name for name, _ in chat[1]]
    value = json.loads(arguments, strict=False)
    assert message[1] == [("edit", json.loads(value) if isinstance(value, str) else value)]
    assert json.loads(chat[1][0][1]) == message[1][0][1]
