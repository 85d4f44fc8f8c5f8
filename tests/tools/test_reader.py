"""Answers of models, however they come cut into pieces, and the calls that are read out of them."""

import json
import re
from collections.abc import Sequence

import pytest

from app.tools.formats import HARMONY, HERMES, LFM, LLAMA, MISTRAL, TOOL_FORMATS, ToolFormat
from app.tools.reader import MAX_HELD, CallArguments, CallBegun, Content, FamilyReader, Piece
from tests.tools.calls import FORMATS, TOOLS, reader_of, write

Calls = list[tuple[str, str]]


def pieces_of(text: str, form: ToolFormat, cuts: Sequence[int] = (), **options: bool) -> list[Piece]:
    """What is read of `text`, cut at those places."""
    reader = reader_of(form, TOOLS, **options)
    ends = [*sorted(cut for cut in cuts if cut < len(text)), len(text)]
    read = [piece for start, end in zip([0, *ends], ends, strict=False) for piece in reader.push(text[start:end])]
    return [*read, *reader.finish()]


def put_together(pieces: Sequence[Piece]) -> tuple[str, Calls]:
    """Content and calls, as a client adds them up."""
    content = ""
    calls: Calls = []
    for piece in pieces:
        match piece:
            case Content():
                content += piece.text
            case CallBegun():
                assert piece.index == len(calls)
                calls.append((piece.name, ""))
            case CallArguments():
                name, text = calls[piece.index]
                calls[piece.index] = name, text + piece.text
    return content, calls


def read(text: str, form: ToolFormat, cuts: Sequence[int] = (), **options: bool) -> tuple[str, Calls]:
    return put_together(pieces_of(text, form, cuts, **options))


F, G = ("f", '{"a": 1}'), ("g", "{}")


@pytest.mark.parametrize(
    ("answer", "form", "content", "calls"),
    [
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', HERMES, "", [F]),
        ('<tool_call>[{"name": "f", "parameters": {"a": 1}}]</tool_call>', HERMES, "", [F]),
        ('<tool_call>{"name": "g"}</tool_call>', HERMES, "", [G]),
        ('<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', HERMES, "", [F]),
        ("Let me look.\n" + write(HERMES, F), HERMES, "Let me look.", [F]),
        ('<tool_call>{"name":"f", "arguments": {"a": 1}}<tool_call>{"name":"g", "arguments": {}}', HERMES, "", [F, G]),
        ('[TOOL_CALLS] [{"name":"f", "arguments": {"a": 1}, "id": "a"}, {"name":"g"}]', MISTRAL, "", [F, G]),
    ],
    ids=["other order", "list", "no arguments", "nested", "after text", "lost end marker", "more fields"],
)
def test_calls_in_an_unusual_form_are_read_too(answer: str, form: ToolFormat, content: str, calls: Calls) -> None:
    assert read(answer, form) == read(answer, form, range(0, 120, 7)) == (content, calls)


@pytest.mark.parametrize(
    ("arguments", "strict"),
    [
        ('{"a": "1\n2\t\x013"}', r'{"a": "1\n2\t\u00013"}'),
        ('{"a": "1\\\\\n2\\\n3"}', r'{"a": "1\\\n2\\\n3"}'),
        (json.dumps('{"a":\t"1\n2"}'), r'{"a": "1\n2"}'),
        (r'{"a": "\ude00\ud83d\ude00\\ud83d\ud83d"}', r'{"a": "\ufffd\ud83d\ude00\\ud83d\ufffd"}'),
        ("null", "{}"),
        ('""', "{}"),
    ],
)
@FORMATS
def test_arguments_of_small_models_are_strict_json(form: ToolFormat, arguments: str, strict: str) -> None:
    """Line breaks and halves of characters in strings, an object in a text, and none at all."""
    for step, is_held in ((3, False), (1, True)):
        assert read(write(form, ("f", arguments)), form, range(0, 99, step), is_held=is_held) == ("", [("f", strict)])


NO_CALLS = [
    *("find it", "[1]", '{"name": 3, "arguments": {}}', '{"name": "f", "arguments": "x"}'),
    *('{"name": "f", "arguments": {"a": True}}', '{"name": "f", "arguments": {"a": NaN}}'),
    *('{"name": "a\\q"}', '{"name": "\\ud800"}', '{"a": ' * 5_000 + "}" * 5_000),
]


IN_JSON = [form for form in TOOL_FORMATS if not form.pair and form is not HARMONY]
HALVES = ['{"a": "print("}")"}', '{"a": "x"} and "b": "y"}', '{"a": 1} }, "b": 2}', '{"a": 1e999}']
"""Arguments that seem to end too early: small models leave quotation marks in texts as they are. And a huge number."""


@pytest.mark.parametrize(
    ("answer", "form"),
    [
        ('Hm. <tool_call>{"name": "nope", "arguments": {"a": "<tool_call>"}}</tool_call> So.', HERMES),
        ('[TOOL_CALLS] [{"name": "nope", "arguments": {}}]', MISTRAL),
        ('Use the <tool_call> tag like so: <tool_call>{"name": "name"}</tool_call>', HERMES),
        ('Write `<tool_call>{"name": "f", "arguments": {}}</tool_call>`.', HERMES),
        *((f"so <tool_call>{inner}</tool_call> then", HERMES) for inner in NO_CALLS),
        *((write(form, ("f", half)), form) for form in IN_JSON for half in HALVES),
        ("<|tool_call_start|>[f(a=1e999)]<|tool_call_end|>", LFM),
        ('{"name": "Bob", "age": 5}', LLAMA),
        ('{"name": "f", "age": 5}', LLAMA),
        ('{"name": "Bob", "parameters": {}}', LLAMA),
        ('<tool_call>{"name": "f", "arguments": {"a": "', HERMES),
    ],
)
def test_what_no_tool_takes_stays_as_the_model_wrote_it(answer: str, form: ToolFormat) -> None:
    assert read(answer, form) == read(answer, form, range(0, 120, 7)) == (answer, [])


@pytest.mark.parametrize(("form", "pattern"), [(HERMES, r"call_\w{24}"), (MISTRAL, r"[A-Za-z0-9]{9}")])
def test_ids_are_of_the_form_that_the_template_takes(form: ToolFormat, pattern: str) -> None:
    begun = [each for each in pieces_of(write(form, ("f", "{}"), ("g", "{}")), form) if isinstance(each, CallBegun)]
    assert len({each.id for each in begun}) == 2
    assert all(re.fullmatch(pattern, each.id) for each in begun)


@pytest.mark.timeout(20)
@FORMATS
@pytest.mark.parametrize(
    ("start", "more"),
    [
        ('<tool_call>{"name": "', "x"),
        ("<tool_call>", " "),
        ("<tool_call>", "["),
        ("", "<"),
        ('{"name": "f", "arguments": {"a": "', "x"),
        ('<tool_call>{"name": "f", "arguments": {"a": ', "["),
    ],
)
def test_a_long_answer_costs_no_more_for_each_character(form: ToolFormat, start: str, more: str) -> None:
    """Pushed 4 characters at a time; a reader that looks back over what it holds would take minutes."""
    reader = reader_of(form, TOOLS)
    told = list(reader.push(start))
    for _ in range(5_000):
        told += reader.push(more * 4)
    told += reader.finish()
    assert not reader.is_whole


@FORMATS
def test_calls_that_are_cut_anywhere_leave_no_text_where_only_calls_may_come(form: ToolFormat) -> None:
    text = write(form, *[("add", '{"a": 3}')] * (2 if form.can_repeat else 1))
    for end in range(len(text)):
        reader = reader_of(form, TOOLS, only_calls=True)
        content, calls = put_together([*reader.push(text[:end]), *reader.finish()])
        assert content == ""
        assert len(calls) == reader.calls


def test_calls_are_whole_if_all_their_arguments_are_objects() -> None:
    whole = write(HERMES, ("f", '{"a": 1}'))
    long = write(HERMES, ("f", json.dumps({"a": "x" * MAX_HELD}).replace("}", ", foo}")))
    half = long.replace(", foo}", '}")"}')
    assert read(half, HERMES, at_once=True) == (half, [])
    with pytest.raises(ValueError, match="Extra data"):  # what has been told of it is no JSON either
        json.loads(read(half, HERMES)[1][0][1])
    for answer in (whole, whole[:-16], long, half, write(HERMES, ("f", '{"a": foo}')), "No."):
        reader = FamilyReader(HERMES, TOOLS)
        assert [*reader.push(answer), *reader.finish(cut=True)]
        assert reader.is_whole == (answer == whole)
