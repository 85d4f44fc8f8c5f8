"""Calls of tools as each API tells them, whole and streamed, wherever the answer is cut."""

import json
from collections.abc import Callable
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
from app.tools.definitions import ToolMode, ToolUse
from app.tools.formats import THINKING, TOOL_FORMATS
from app.tools.reader import Answer
from app.tools.support import ToolSupport
from app.tools.thinking import Opening, Seal
from tests.tools.calls import TOOLS, write
from tests.tools.test_offering import tokens

SEAL = Seal()


async def tell(new_answer: Callable[[], Answer], text: str, piece: int, *, cut: bool) -> list[Any]:
    """What chats, messages and responses tell of an answer that comes in pieces of so many characters: each its
    content, its calls, why it ended, and its thoughts.
    """
    reason = FinishReason.LENGTH if cut else FinishReason.STOP
    end = TurnFinished(Ticket(1), reason, TurnUsage(1, 0, 9, 0), 10)
    items: list[Any] = [*(TextChunk(text[start : start + piece]) for start in range(0, len(text), piece)), end]
    body, tokens = ResponseBody.model_validate({"model": "m", "input": "x"}), cast("Tokens", None)
    chat = ChatChunkWriter(tokens, logprobs=False, new_answer=new_answer, on_calls=lambda names: None)
    choice = whole_choice(0, [entry for item in items for entry in await chat.entries(0, item)])
    chosen = choice["message"]
    functions = [call["function"] for call in chosen.get("tool_calls", ())]
    message = MessageWriter("tiny", 1, new_answer(), on_calls=lambda names: None, seal=SEAL)
    whole = whole_message([event for item in items for event in message.events(item)])
    kinds = ("text", "tool_use", "thinking")
    says, uses, thinks = ([each for each in whole["content"] if each["type"] == kind] for kind in kinds)
    assert [SEAL.open(each["signature"]) for each in thinks] == [each["thinking"] for each in thinks]
    begun = ResponseObject.begin(body, body.to_params(NEUTRAL), "resp_1", 1)
    response = ResponseWriter(begun, tokens, new_answer())
    events = [event for item in items[:-1] for event in response.write(item)] + list(response.finish(end))
    made = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    said, thought = (
        "".join(part["text"] for item in made if item["type"] == kind for part in item["content"])
        for kind in ("message", "reasoning")
    )
    called = [(item["name"], item["arguments"]) for item in made if item["type"] == "function_call"]
    told = [(each["name"], each["arguments"]) for each in functions]
    text, used = "".join(each["text"] for each in says), [(each["name"], each["input"]) for each in uses]
    return [
        (chosen["content"] or "", told, choice["finish_reason"], chosen.get("reasoning_content", "")),
        (text, used, whole["stop_reason"], "".join(each["thinking"] for each in thinks)),
        (said, called, begun.status, thought),
    ]


HARMONY_THOUGHT = "<|channel|>analysis<|message|>Hm: 1 < 2.<|end|><|start|>assistant"
THOUGHT = "Hm: 1 < 2.\n<tool_call>?"
TALKS = [
    ("hermes", "", "Let me look: 1 < 2.\n", '{"text": "l1\nl2 \\"<tool_call>"}'),
    ("hermes", "", "", json.dumps('{"text": "x"}')),
    ("mistral", "", "So [1]. ", '{"text": "l1\n"}'),
    ("llama", "", "", '{"text": "l1\tl2", "n": [1, {}]}'),
    ("harmony", HARMONY_THOUGHT, "", '{"text": "<l1>", "n": [1, {}]}'),
    *(
        (name, "think", "So: ", '{"text": "l1 <l2>", "n": [1, {}]}')
        for name in ("hermes", "deepseek_v31", "deepseek_v3", "kimi_k2", "lfm2")
    ),
    *((name, "think", "So: ", '{"text": "l1 <l2>"}') for name in ("glm", "qwen3_coder", "minimax_m2")),
    ("mistral_v11", "brackets", "", '{"text": "x"}'),
    ("gemma4", "gemma4", "Let me: ", '{"text": "x", "n": [1, {}]}'),
]


@pytest.mark.parametrize(("name", "thinks", "before", "arguments"), TALKS, ids=lambda value: str(value)[:16])
async def test_wherever_an_answer_is_cut_all_apis_tell_the_same(
    name: str, thinks: str, before: str, arguments: str
) -> None:
    thinking = next((each for each in THINKING if each.name == thinks), None)
    support = ToolSupport(tokens("{{ messages }}"), f"{name}+{thinks}" if thinking else name)
    form = next(each for each in TOOL_FORMATS if each.name == name)
    use = ToolUse(tuple(TOOLS), ToolMode.AUTO, frozenset(tool.name for tool in TOOLS))
    thought = THOUGHT if thinking else "Hm: 1 < 2." if thinks else ""
    text = f"\n{thought}\n{thinking.end}\n\n" if thinking else thinks
    is_open = name in ("glm", "deepseek_v31")
    if thinking and not is_open:
        text = thinking.open + text
    text += before + write(form, ("edit", arguments))
    opening = Opening.OPEN if is_open else Opening.FREE

    def new_answer() -> Answer:
        return support.answer(use, has_form=False, opening=opening)

    for end in range(1, len(text) + 1):
        told = await tell(new_answer, text[:end], end, cut=end < len(text))
        assert told == await tell(new_answer, text[:end], 1, cut=end < len(text)), end
        chat, message, response = told
        assert before.startswith(chat[0]), end
        assert thought.startswith(chat[3]), end
        assert chat[0] == message[0] == response[0]
        assert chat[1] == response[1]
        assert chat[3] == message[3] == response[3]
        ends = ("length", "max_tokens", "incomplete") if end < len(text) else ("tool_calls", "tool_use", "completed")
        assert (chat[2], message[2], response[2]) == ends
        assert [name for name, _ in message[1]] == [name for name, _ in chat[1]]
    assert chat[3] == thought
    value = json.loads(arguments, strict=False)
    assert message[1] == [("edit", json.loads(value) if isinstance(value, str) else value)]
    assert json.loads(chat[1][0][1]) == message[1][0][1]
