"""Answers of models, however they come cut into pieces, and the calls that are read out of them."""

import json
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.tools.definitions import HERMES, MISTRAL, ToolFormat
from app.tools.reader import CallArguments, CallBegun, Content, FamilyReader, Piece
from tests.tools.calls import FORMATS, write

Calls = list[tuple[str, str]]


def pieces_of(text: str, form: ToolFormat, cuts: Sequence[int] = ()) -> list[Piece]:
    """What is read of `text`, cut at those places."""
    reader = FamilyReader(form)
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


def read(text: str, form: ToolFormat, cuts: Sequence[int] = ()) -> tuple[str, Calls]:
    return put_together(pieces_of(text, form, cuts))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
some_calls = st.lists(
    st.tuples(
        st.from_regex(r"[A-Za-z0-9_-]{1,12}", fullmatch=True),
        st.dictionaries(st.text(max_size=6), json_values, max_size=3).map(json.dumps),
    ),
    min_size=1,
    max_size=3,
)
some_cuts = st.lists(st.integers(0, 300), max_size=20)


@FORMATS
@given(calls=some_calls, cuts=some_cuts)
def test_calls_come_back_as_they_were_written(form: ToolFormat, calls: Calls, cuts: list[int]) -> None:
    written = calls if form.can_repeat else calls[:1]
    assert read(write(form, *written), form, cuts) == ("", written)


@given(text=st.text(st.sampled_from('<>{}"[] atol_cnme:\n'), max_size=60), cuts=some_cuts)
def test_how_a_text_is_cut_makes_no_difference(text: str, cuts: list[int]) -> None:
    assert read(text, HERMES, cuts) == read(text, HERMES)


@FORMATS
@given(text=st.text(st.characters(blacklist_characters="<[{\0"), max_size=40), cuts=some_cuts)
def test_plain_text_is_content_to_the_last_space(form: ToolFormat, text: str, cuts: list[int]) -> None:
    assert read(text, form, cuts) == (text, [])


F, G = ("f", '{"a": 1}'), ("g", "{}")


@pytest.mark.parametrize(
    ("answer", "form", "content", "calls"),
    [
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', HERMES, "", [F]),
        ('<tool_call>[{"name": "f", "parameters": {"a": 1}}]</tool_call>', HERMES, "", [F]),
        ('<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', HERMES, "", [F]),
        ("Let me look.\n" + write(HERMES, F), HERMES, "Let me look.", [F]),
        (
            '<tool_call>{"name":"f", "arguments": {"a": 1}}<tool_call>{"name":"g", "arguments": {}}',
            HERMES,
            "",
            [F, G],
        ),
        (
            '[TOOL_CALLS] [{"name":"f", "arguments": {"a": 1}, "id": "a"}, {"name":"g", "arguments": {}}]',
            MISTRAL,
            "",
            [F, G],
        ),
    ],
    ids=["other order", "list", "nested", "after text", "lost end marker", "more fields"],
)
def test_calls_in_an_unusual_form_are_read_too(answer: str, form: ToolFormat, content: str, calls: Calls) -> None:
    assert read(answer, form) == read(answer, form, range(0, 120, 7)) == (content, calls)


@pytest.mark.parametrize(
    "inner",
    [
        *("find it", "[1]", '{"name": 3, "arguments": {}}', '{"name": "f", "arguments": "x"}'),
        *('{"name": "a\\q"}', '{"name": "\\ud800"}', '{"a": ' * 5_000 + "}" * 5_000),
    ],
)
def test_what_is_no_call_stays_in_the_content(inner: str) -> None:
    content, calls = read(f"so <tool_call>{inner}</tool_call> then", HERMES)
    assert (content, calls) == (f"so <tool_call>{inner}</tool_call> then", [])


def test_a_call_that_the_length_limit_has_cut_keeps_what_there_is() -> None:
    assert read('<tool_call>\n{"name": "f", "arguments": {"a": ', HERMES) == ("", [("f", '{"a": ')])
    assert read('<tool_call>\n{"na', HERMES)[0].startswith('<tool_call>\n{"na')


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
    reader = FamilyReader(form)
    told = list(reader.push(start))
    for _ in range(5_000):
        told += reader.push(more * 4)
    told += reader.finish()
    assert not reader.is_whole


@FORMATS
@given(text=st.text(st.sampled_from('<>{}[]"\\,: \ud800aftool_callnmergus/TOOL_CALLS|'), max_size=120), cuts=some_cuts)
def test_no_text_raises_and_none_is_lost(form: ToolFormat, text: str, cuts: list[int]) -> None:
    content, calls = read(text, form, cuts)
    if not calls and not any(marker in text for marker in (form.end_marker or form.marker, form.marker) if marker):
        assert content == text


def test_a_marker_within_a_string_ends_nothing() -> None:
    arguments = '{"t": "a </tool_call> <tool_call> b"}'
    assert read(write(HERMES, ("f", arguments)), HERMES) == ("", [("f", arguments)])


def test_calls_are_whole_if_all_their_arguments_are_objects() -> None:
    whole = write(HERMES, ("f", '{"a": 1}'))
    cut = '<tool_call>{"name": "f", "arguments": {"a": '
    ill = write(HERMES, ("f", '{"a": foo}')), write(HERMES, ("f", "{}"), ("g", '{"a": tru}'))
    for answer in (whole, cut, *ill, "No."):
        reader = FamilyReader(HERMES)
        assert [*reader.push(answer), *reader.finish()]
        assert reader.is_whole == (answer == whole)


def test_an_answer_of_another_form_has_no_calls() -> None:
    reader = FamilyReader(HERMES, only_at_start=True)
    answer = '{"s": "<tool_call>x"}'
    assert put_together([*reader.push(answer), *reader.finish()]) == (answer, [])
    reader = FamilyReader(HERMES, only_at_start=True)
    assert put_together([*reader.push(write(HERMES, ("f", "{}"))), *reader.finish()]) == ("", [("f", "{}")])


@FORMATS
def test_calls_that_are_cut_anywhere_leave_no_text_where_only_calls_may_come(form: ToolFormat) -> None:
    text = write(form, *[("add", '{"a": 3}')] * (2 if form.can_repeat else 1))
    for end in range(len(text)):
        reader = FamilyReader(form, only_calls=True)
        content, calls = put_together([*reader.push(text[:end]), *reader.finish()])
        assert content == ""
        assert len(calls) == reader.calls
