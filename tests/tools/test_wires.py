"""Calls of tools as each API tells them, whole and streamed, wherever the answer is cut."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

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
from app.tools.formats import HARMONY, THINKING, Thinking, ToolFormat
from app.tools.reader import Answer
from app.tools.support import ToolSupport
from app.tools.thinking import Opening, Seal
from tests.tools.calls import ALL_FORMATS, TOOLS, write
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
    thoughts: Any = {"seal": SEAL, "shows_thoughts": True, "thinks": True}
    message = MessageWriter({"model": "tiny"}, 1, new_answer(), on_calls=lambda names: None, **thoughts)
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


odd_text = st.text(st.sampled_from('ab_ \n<>{}[]"|:`é'), max_size=24)
some_arguments = st.dictionaries(st.sampled_from("abc"), odd_text | st.integers(), max_size=2).map(json.dumps)
some_thinking = st.sampled_from([None, *(each for each in THINKING if each.name != "harmony")])


@ALL_FORMATS
@given(
    thinking=some_thinking,
    texts=st.tuples(odd_text, odd_text, odd_text),
    calls=st.lists(st.tuples(st.sampled_from(["f", "edit"]), some_arguments), max_size=2),
    piece=st.integers(1, 9),
    shares=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    is_open=st.booleans(),
)
def test_wherever_an_answer_is_cut_all_apis_tell_the_same_in_pieces_and_at_once(
    form: ToolFormat,
    thinking: Thinking | None,
    texts: tuple[str, str, str],
    calls: list[tuple[str, str]],
    piece: int,
    shares: list[float],
    is_open: bool,
) -> None:
    """At some of the cuts at which `test_cuts.py` reads them."""
    thought, before, after = texts
    if form is HARMONY:
        thinking = THINKING[0]
    name = form.name if thinking is None or form is HARMONY else f"{form.name}+{thinking.name}"
    support = ToolSupport(tokens("{{ messages }}"), name)
    use = ToolUse(tuple(TOOLS), ToolMode.AUTO, frozenset(tool.name for tool in TOOLS))
    opening = Opening.OPEN if is_open and form is not HARMONY else Opening.FREE
    text = "" if thinking is None else thinking.open * (opening is Opening.FREE) + thought + thinking.end
    text += before + (write(form, *calls[: 2 if form.can_repeat else 1]) if calls else "") + after

    async def check(end: int) -> None:
        def new_answer() -> Answer:
            return support.answer(use, has_form=False, opening=opening)

        told = await tell(new_answer, text[:end], piece, cut=end < len(text))
        assert told == await tell(new_answer, text[:end], max(1, end), cut=end < len(text))
        chat, message, response = told
        assert chat[0] == message[0] == response[0]
        assert chat[1] == response[1]
        assert [name for name, _ in message[1]] == [name for name, _ in chat[1]]
        assert chat[3] == message[3] == response[3]
        if end < len(text):
            assert (chat[2], message[2], response[2]) == ("length", "max_tokens", "incomplete")
        else:
            assert [json.loads(arguments) for _, arguments in chat[1]] == [found for _, found in message[1]]

    for share in (1, *shares):
        asyncio.run(check(round(share * len(text))))
