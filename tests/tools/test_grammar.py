"""Grammars of calls, as llguidance runs them over a real vocabulary."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from app.model_store.byte_tokenizer import IM_START_ID, byte_tokenizer
from app.tools.definitions import Tool, ToolMode, ToolUse
from app.tools.formats import HERMES, LLAMA, MISTRAL, ToolFormat
from app.tools.grammar import MAX_CALLS, call_grammar

ADD = Tool("add", "sums", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
FIND = Tool("find", None, {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]})
NAMES = frozenset({"add", "find"})
FORMATS = pytest.mark.parametrize("form", [HERMES, MISTRAL, LLAMA], ids=lambda form: form.name)

BACKEND = byte_tokenizer(300)
VOCABULARY: LLTokenizer = from_tokenizer(BACKEND, n_vocab=300)


def write(form: ToolFormat, *calls: tuple[str, str]) -> str:
    return form.write_all([form.write(json.dumps(name), arguments) for name, arguments in calls])


def takes(grammar: str, text: str) -> bool:
    """Whether `text` is a whole answer."""
    matcher = LLMatcher(VOCABULARY, grammar)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = list(text.encode())
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


def grammar_of(form: ToolFormat, use: ToolUse) -> str:
    return call_grammar(use, form, lambda text: None)


@FORMATS
def test_a_turn_that_must_call_does_nothing_else(form: ToolFormat) -> None:
    grammar = grammar_of(form, ToolUse((ADD, FIND), ToolMode.REQUIRED, NAMES))
    assert takes(grammar, write(form, ("add", '{"a": 3}')))
    assert takes(grammar, write(form, ("find", '{"what": "x"}')))
    ill_typed, unknown = write(form, ("add", '{"a": "3"}')), write(form, ("drop", "{}"))
    for wrong in ("hello", "", ill_typed, unknown, "So: " + write(form, ("add", '{"a": 3}'))):
        assert not takes(grammar, wrong)


@FORMATS
def test_several_calls_only_where_they_are_allowed(form: ToolFormat) -> None:
    two = write(form, ("add", '{"a": 3}'), ("find", '{"what": "x"}'))
    assert takes(grammar_of(form, ToolUse((ADD, FIND), ToolMode.REQUIRED, NAMES)), two) == form.can_repeat
    for mode in (ToolMode.REQUIRED, ToolMode.AUTO):
        assert not takes(grammar_of(form, ToolUse((ADD, FIND), mode, NAMES, parallel=False)), two)


@FORMATS
def test_only_the_allowed_of_the_tools_are_called(form: ToolFormat) -> None:
    for mode in (ToolMode.REQUIRED, ToolMode.AUTO):
        grammar = grammar_of(form, ToolUse((ADD, FIND), mode, frozenset({"find"})))
        assert takes(grammar, write(form, ("find", '{"what": "x"}')))
        assert not takes(grammar, write(form, ("add", '{"a": 3}')))
        assert takes(grammar, "I would rather not.") == (mode is ToolMode.AUTO)


def test_a_marker_that_is_a_special_token_is_written_with_it() -> None:
    marker = IM_START_ID
    grammar = call_grammar(ToolUse((ADD,), ToolMode.REQUIRED, frozenset({"add"})), MISTRAL, lambda text: marker)
    text = write(MISTRAL, ("add", '{"a": 3}')).removeprefix(MISTRAL.marker)
    matcher = LLMatcher(VOCABULARY, grammar)
    assert not matcher.is_error(), matcher.get_error()
    assert matcher.try_consume_tokens([marker, *text.encode()]) == 1 + len(text)
    assert not takes(grammar, MISTRAL.marker + text)


@pytest.mark.parametrize(
    ("use", "held"),
    [
        (ToolUse(), False),
        (ToolUse((ADD, FIND), ToolMode.AUTO, NAMES), False),
        (ToolUse((ADD, FIND), ToolMode.AUTO, frozenset({"add"})), True),
        (ToolUse((ADD, FIND), ToolMode.AUTO, NAMES, parallel=False), True),
        (ToolUse((ADD, FIND), ToolMode.REQUIRED, NAMES), True),
        (ToolUse((Tool("add", strict=True),), ToolMode.AUTO, frozenset({"add"})), True),
    ],
)
def test_a_grammar_only_where_the_model_could_do_what_is_not_allowed(use: ToolUse, held: bool) -> None:
    assert use.is_held is held


def test_what_would_be_read_as_a_call_is_no_text() -> None:
    grammar = grammar_of(LLAMA, ToolUse((ADD, FIND), ToolMode.AUTO, frozenset({"find"})))
    call = write(LLAMA, ("add", '{"a": 3}'))
    for wrong in (call, f" {call}", f"\n\x1c{call}", f"<|python_tag|>{call}", f" <|python_tag|>{call}"):
        assert not takes(grammar, wrong)
    for text in ("", " ", "So: {", "<|python_tag|>"):
        assert takes(grammar, text)


@pytest.mark.parametrize("form", [HERMES, MISTRAL], ids=lambda form: form.name)
@pytest.mark.parametrize("parallel", [True, False])
def test_text_never_holds_the_marker(form: ToolFormat, parallel: bool) -> None:
    use = ToolUse((ADD,), ToolMode.AUTO, frozenset({"add"}), parallel=parallel)
    call = write(form, ("add", '{"a": 3}'))
    for special_ids in ({}, {form.marker: IM_START_ID}):
        grammar = call_grammar(use, form, special_ids.get)
        assert takes(grammar, "")
        assert takes(grammar, f"So: {form.marker[:-1]}")
        assert not takes(grammar, f"So: {form.marker} of {form.marker}")
        assert takes(grammar, f"So: {call}") is not bool(special_ids)  # the marker is a token then


@pytest.mark.parametrize("mode", [ToolMode.AUTO, ToolMode.REQUIRED])
def test_no_call_follows_the_last_that_may_be_made(mode: ToolMode) -> None:
    grammar = grammar_of(HERMES, ToolUse((ADD,), mode, frozenset({"add"})))
    calls = write(HERMES, *[("add", '{"a": 3}')] * MAX_CALLS)
    assert takes(grammar, calls)
    assert takes(grammar, calls + " Done.") is (mode is ToolMode.AUTO)
    assert not takes(grammar, write(HERMES, *[("add", '{"a": 3}')] * (MAX_CALLS + 1)))
    assert not takes(grammar, calls + write(HERMES, ("drop", "{}")))


@pytest.mark.parametrize(
    ("parameters", "good", "wrong"),
    [
        ({"properties": {"a": {"type": "integer"}}}, '{"a": 3}', ["3", "[]", '"a"', "null"]),
        ({"anyOf": [{"required": ["a"]}, {}]}, '{"a": 3}', ["3", "[]", '"a"', "null"]),
        (None, "{}", ['{"a": 3}']),
        ({"properties": {}}, "{}", ['{"a": 3}']),
    ],
)
def test_arguments_are_an_object_whether_the_schema_says_so_or_not(
    parameters: dict[str, Any] | None, good: str, wrong: list[str]
) -> None:
    use = ToolUse((Tool("add", None, parameters),), ToolMode.REQUIRED, frozenset({"add"}))
    grammar = grammar_of(LLAMA, use)
    assert takes(grammar, write(LLAMA, ("add", good)))
    assert not any(takes(grammar, write(LLAMA, ("add", each))) for each in wrong)
