"""Answers of every format, cut at each place where `max_tokens` may cut them, also where calls are damaged, and as each
API tells them, whole and streamed.
"""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache, partial
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers.cli.serving.utils import get_response_template
from transformers.utils.chat_parsing import parse_response

from app.anthropic.answers import MessageWriter, whole_message
from app.domain.values import NEUTRAL, FinishReason, Ticket, TurnUsage
from app.messages import TurnFinished
from app.model_store.saved import ModelTokenizer
from app.openai.answers import ChatChunkWriter, whole_choice
from app.openai.response import ResponseObject
from app.openai.response_events import ResponseWriter
from app.openai.response_input import ResponseBody
from app.text.generation import TextChunk
from app.text.tokenizer import Tokens
from app.tools.definitions import ToolMode, ToolUse
from app.tools.formats import (
    GEMMA,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL_NAMES,
    QWEN_CODER,
    THINKING,
    TOOL_FORMATS,
    ToolFormat,
)
from app.tools.reader import Answer, CallArguments, CallBegun, Content, Reasoning, load_json
from app.tools.support import ToolSupport
from app.tools.thinking import Opening, Seal
from tests.hugging_face import byte_tokenizer
from tests.tools.calls import ALL_FORMATS, TOOLS, write
from tests.tools.test_offering import tokens

USE = ToolUse(tuple(TOOLS), ToolMode.AUTO, frozenset(tool.name for tool in TOOLS))
CUT, STOPPED = (
    TurnFinished(Ticket(1), reason, TurnUsage(1, 0, 9, 0), 10) for reason in (FinishReason.LENGTH, FinishReason.STOP)
)
TEMPLATES = {"qwen3": (HERMES, THINKING[1]), "qwen3_5": (QWEN_CODER, THINKING[1]), "gemma4": (GEMMA, THINKING[3])}
"""Types of models for which Transformers itself has a template of answers."""


def template_of(kind: str) -> Any:
    config: Any = SimpleNamespace(config=SimpleNamespace(model_type=kind))
    return get_response_template(SimpleNamespace(), config)


@cache
def support_of(name: str, markers: tuple[str, ...] = ()) -> ToolSupport:
    """`name` is a format, or a type of models whose checkpoint says itself how its answers are read."""
    if name not in TEMPLATES:
        return ToolSupport(tokens("{{ messages }}", *markers), name)
    tokenizer = byte_tokenizer(300)
    tokenizer.response_template = template_of(name)
    return ToolSupport(Tokens(ModelTokenizer.of(tokenizer), frozenset({257})))


class Told:
    """What an answer has told so far."""

    def __init__(self, answer: Answer, content: str = "", thoughts: str = "", calls: Any = ()) -> None:
        self.answer, self.content, self.thoughts = answer, content, thoughts
        self.calls: list[tuple[str, str]] = [*calls]

    def take(self, *items: TextChunk | TurnFinished) -> "Told":
        for piece in (piece for item in items for piece in self.answer.pieces(item)):
            match piece:
                case Content():
                    self.content += piece.text
                case Reasoning():
                    self.thoughts += piece.text
                case CallBegun():
                    self.calls.append((piece.name, ""))
                case CallArguments():
                    name, text = self.calls[piece.index]
                    self.calls[piece.index] = name, text + piece.text
        return self

    def ended(self, end: TurnFinished, *shared: Any) -> tuple[str, str, list[tuple[str, str]], bool]:
        """What it will have told if it ends here. `shared` are parts of its reader that never change."""
        answer = deepcopy(self.answer, {id(each): each for each in shared})
        told = Told(answer, self.content, self.thoughts, self.calls).take(end)
        return told.content, told.thoughts, told.calls, bool(answer.calls)


def check_every_cut(new: Callable[[], Answer], units: list[str], rng: Random, *shared: Any, damaged: bool) -> Any:
    """Cut before each of the units, characters or tokens; returns what the whole tells."""
    one_by_one, some, waiting = Told(new()), Told(new()), ""
    content, thoughts, calls, _ = whole = Told(new()).take(TextChunk("".join(units))).ended(STOPPED, *shared)
    for count in range(len(units) + 1):
        if count:
            one_by_one.take(TextChunk(units[count - 1]))
            waiting += units[count - 1]
        at_once = Told(new()).take(TextChunk("".join(units[:count])))
        part = at_once.ended(CUT, *shared)
        assert one_by_one.ended(CUT, *shared) == part
        if count == len(units) or rng.random() < 0.3:
            some.take(TextChunk(waiting))
            waiting = ""
            assert some.ended(CUT, *shared) == part
        assert content.startswith(part[0].rstrip())  # white space before a call goes with it
        assert thoughts.startswith(part[1])
        assert part[2][:-1] == calls[: max(0, len(part[2]) - 1)]
        for last in part[2][-1:]:
            told = ([*calls, ("", "")])[len(part[2]) - 1]
            if not (told[0] == last[0] and told[1].startswith(last[1])):
                # What comes after a call may make it text, but not one that was sure to be whole.
                assert damaged
                assert last[0] in content
                assert not part[3]
            assert not part[3] or isinstance(load_json(last[1]), dict)
    assert one_by_one.ended(STOPPED, *shared) == some.ended(STOPPED, *shared) == whole
    return whole


def units_of(text: str, markers: tuple[str, ...]) -> Iterator[str]:
    """Characters, and markers that are tokens."""
    between = re.split(f"({'|'.join(map(re.escape, sorted(markers, key=len, reverse=True)))})", text)
    for index, part in enumerate(between if markers else [text]):
        yield from [part] if index % 2 else part


plain = st.text(st.characters(blacklist_characters="<>[]{}`|｜◁▷\0", blacklist_categories=["Cs"]), max_size=9)
odd = st.text(st.sampled_from('ab_ \n<>{}[]"\\|:`é'), min_size=1, max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | odd | plain,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)
some_calls = st.lists(
    st.tuples(st.sampled_from(["f", "edit"]), st.dictionaries(st.sampled_from(["a", "b_c"]), values, max_size=2)),
    max_size=3,
)
some_damage = st.none() | st.tuples(st.integers(0, 200), st.integers(0, 20), odd)
"""Where text is lost, how much, and what stands there."""
FEW = settings(max_examples=max(3, settings().max_examples // 10))


@pytest.mark.parametrize("name", [*(form.name for form in TOOL_FORMATS), *TEMPLATES])
@FEW
@given(
    thinking=st.sampled_from([None, *THINKING[1:]]),
    texts=st.tuples(plain, plain, plain),
    calls=some_calls,
    damage=some_damage,
    is_open=st.booleans(),
    has_tokens=st.booleans(),
    rng=st.randoms(use_true_random=False),
)
def test_at_every_cut_pieces_tell_what_is_told_at_once(
    name: str, thinking: Any, texts: Any, calls: Any, damage: Any, is_open: bool, has_tokens: bool, rng: Random
) -> None:
    """And nothing that the whole does not tell: no markup, and no call with other arguments."""
    thought, before, after = texts
    if name in TEMPLATES:
        (form, thinking), full = TEMPLATES[name], name
        markers: tuple[str, ...] = ()
    else:
        form = next(each for each in TOOL_FORMATS if each.name == name)
        thinking = THINKING[0] if form is HARMONY else thinking
        full = name if thinking is None or form is HARMONY else f"{name}+{thinking.name}"
        markers = tuple(form.markers | (thinking.markers if thinking else set())) if has_tokens else ()
    support, opening = support_of(full, markers), Opening.FREE
    calls = calls if form.can_repeat else calls[:1]
    text = write(form, *((each, json.dumps(arguments)) for each, arguments in calls)) if calls else ""
    if form is HARMONY:
        text = (f"<|channel|>final<|message|>{before}<|end|><|start|>assistant" if before else "") + text
    elif form is LLAMA:
        text = text or before
    else:
        text = before + text + ("" if form is MISTRAL_NAMES and calls else after)
    if thinking is not None:
        opening = Opening.OPEN if is_open and thinking is not THINKING[0] else opening
        text = thinking.open * (opening is Opening.FREE) + thought + thinking.end + text
    if damage is not None:
        text = text[: damage[0]] + damage[2] + text[damage[0] + damage[1] :]
    shared = (form, thinking, *TOOLS)
    new = lambda: support.answer(USE, has_form=False, opening=opening)  # noqa: E731
    content, _, told, _ = check_every_cut(new, [*units_of(text, markers)], rng, *shared, damaged=damage is not None)
    if damage is None:
        assert not any(marker in content for marker in form.markers)
        assert [each for each, _ in told] == [each for each, _ in calls]
        if form.pair is None:
            assert [json.loads(arguments) for _, arguments in told] == [arguments for _, arguments in calls]


@pytest.mark.parametrize("kind", TEMPLATES)
@FEW
@given(texts=st.tuples(plain, plain), calls=some_calls, thinks=st.booleans())
def test_answers_are_read_as_transformers_reads_them(kind: str, texts: Any, calls: Any, thinks: bool) -> None:
    """By its own parser with its own templates; ours by the family's description, and by the same template."""
    (form, thinking), template = TEMPLATES[kind], template_of(kind)
    # Transformers takes a word in a text for the name of an argument, and drops blanks at the ends of some texts.
    assume(kind != "gemma4" or not re.search(r"[{,]\s*\w+\s*:", json.dumps(calls)))
    assume(kind != "qwen3_5" or not any(str(it) != str(it).strip() for _, given in calls for it in given.values()))
    thought = thinking.open + texts[0] + thinking.end if thinks else ""
    text = thought + texts[1] + (write(form, *((name, json.dumps(given)) for name, given in calls)) if calls else "")
    read = parse_response(text, template, prefix="", tools=[tool.for_template() for tool in TOOLS])
    functions = [call["function"] for call in read.get("tool_calls", ())]
    theirs = [(each["name"], each["arguments"]) for each in functions]
    for name in (f"{form.name}+{thinking.name}", kind):
        answer = support_of(name).answer(USE, has_form=False, opening=Opening.FREE)
        content, thoughts, told, _ = Told(answer).take(TextChunk(text)).ended(STOPPED)
        assert (content.strip(), thoughts.strip()) == (read.get("content", ""), read.get("reasoning_content", ""))
        assert [(each, json.loads(arguments)) for each, arguments in told] == theirs


SEAL = Seal()


async def tell(new_answer: Callable[[], Answer], text: str, piece: int, *, cut: bool, stop: Any = None) -> list[Any]:
    """What chats, messages and responses tell of an answer that comes in pieces of so many characters, up to a `stop`
    string: each its content, its calls, why it ended, and its thoughts.
    """
    end = CUT if cut else STOPPED
    items: list[Any] = [*(TextChunk(text[start : start + piece]) for start in range(0, len(text), piece))]
    items += [TextChunk("", stop=stop), end]
    body, tokens = ResponseBody.model_validate({"model": "m", "input": "x"}), cast("Tokens", None)
    chat = ChatChunkWriter(tokens, logprobs=False, new_answer=new_answer, on_calls=lambda names: None)
    choice = whole_choice(0, [entry for item in items for entry in await chat.entries(0, item)])
    chosen = choice["message"]
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
    told = [(call["function"]["name"], call["function"]["arguments"]) for call in chosen.get("tool_calls", ())]
    text, used = "".join(each["text"] for each in says), [(each["name"], each["input"]) for each in uses]
    return [
        (chosen["content"] or "", told, choice["finish_reason"], chosen.get("reasoning_content", "")),
        (text, used, whole["stop_reason"], "".join(each["thinking"] for each in thinks)),
        (said, called, begun.status, thought),
    ]


@pytest.mark.parametrize("name", [*(form.name for form in TOOL_FORMATS), *TEMPLATES])
def test_a_stop_string_in_a_call_leaves_no_markup_and_one_at_its_end_the_call(name: str) -> None:
    form = next((form for form in TOOL_FORMATS if form.name == name), TEMPLATES.get(name, (HERMES,))[0])
    text = write(form, ("f", '{"a": "X"}'), *[("f", '{"a": "Y"}')] * form.can_repeat) + "<|call|>" * (form is HARMONY)
    for stop in (form.end_marker or "absent", '{"a', "X", "Y", "\n"):
        new_answer = partial(support_of(name).answer, USE, has_form=False, opening=Opening.FREE)
        told = asyncio.run(tell(new_answer, text.partition(stop)[0], 5, cut=False, stop=stop))
        assert [each[0] for each in told] == ["", "", ""]
        is_whole = stop == form.end_marker or stop not in text
        assert (told[0][2], told[1][2]) == (("tool_calls", "tool_use") if is_whole else ("stop", "stop_sequence"))
        told = asyncio.run(tell(new_answer, "so <", 2, cut=False, stop=stop))
        assert [each[0] for each in told] == ["so <"] * 3, "no call"


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
    form: ToolFormat, thinking: Any, texts: Any, calls: Any, piece: int, shares: list[float], is_open: bool
) -> None:
    """At some of the cuts at which `test_cuts.py` reads them."""
    thought, before, after = texts
    if form is HARMONY:
        thinking = THINKING[0]
    name = form.name if thinking is None or form is HARMONY else f"{form.name}+{thinking.name}"
    support = ToolSupport(tokens("{{ messages }}"), name)
    opening = Opening.OPEN if is_open and form is not HARMONY else Opening.FREE
    text = "" if thinking is None else thinking.open * (opening is Opening.FREE) + thought + thinking.end
    text += before + (write(form, *calls[: 2 if form.can_repeat else 1]) if calls else "") + after

    async def check(end: int) -> None:
        new_answer = partial(support.answer, USE, has_form=False, opening=opening)
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
