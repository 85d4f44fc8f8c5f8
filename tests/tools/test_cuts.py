"""Answers of every format, cut at each place where `max_tokens` may cut them, also where calls are damaged."""

import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cli.serving.utils import get_response_template
from transformers.utils.chat_parsing import parse_response

from app.domain.values import FinishReason, Ticket, TurnUsage
from app.messages import TurnFinished
from app.model_store.saved import ModelTokenizer
from app.text.generation import TextChunk
from app.text.tokenizer import Tokens
from app.tools.definitions import ToolMode, ToolUse
from app.tools.formats import GEMMA, HARMONY, HERMES, LLAMA, MISTRAL_NAMES, QWEN_CODER, THINKING, TOOL_FORMATS
from app.tools.reader import Answer, CallArguments, CallBegun, Content, Reasoning, load_json
from app.tools.support import ToolSupport
from app.tools.thinking import Opening
from tests.hugging_face import byte_tokenizer
from tests.tools.calls import TOOLS, write
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
