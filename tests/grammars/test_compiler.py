"""Grammars compiled: those that are invalid, too large or too slow are refused, and soon."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.domain.errors import Busy, FieldOutOfRange, RefusedGrammar
from app.domain.values import Grammar, GrammarKind
from app.grammars.compiler import MAX_CHARACTERS, MAX_WAITING, Grammars
from app.grammars.matcher import Matcher
from app.model_store.resolve import resolve
from app.model_store.shapes import EOS_ID
from tests.grammars.schemas import json_grammar, regex

VOCAB = 512
TIMEOUT_S = 20
"""2 s of a processor, on a machine that is busy with other tests."""


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(resolve("random:tiny-llama", cache_dir=Path()), VOCAB)
    yield made
    made.close()


def lark(text: str) -> Grammar:
    return Grammar(GrammarKind.LARK, text, "structured_outputs.grammar")


def choice(*choices: str) -> Grammar:
    return Grammar(GrammarKind.CHOICE, json.dumps(choices), "structured_outputs.choice")


def accepts(matcher: Matcher, text: str) -> bool:
    """Whether `text` is a whole text of the grammar."""
    return matcher.consume([*text.encode(), EOS_ID]) and matcher.ended


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (regex("[a-c]+x?"), ["a", "bcax"], ["", "ax!", "d"]),
        (lark('start: "(" start ")" | "x"'), ["x", "((x))"], ["((x)", "y"]),
        (choice("yes", "yesterday", 'a "b"\n\\', "\u00fc"), ["yes", "yesterday", 'a "b"\n\\', "\u00fc"], ["yest", "u"]),
        (json_grammar({"type": "object"}), ["{}", '{"a": [1, 2.5e3, "\u00fc"]}', '{\n  "a": null\n}'], ["[]", "{"]),
        (json_grammar({"type": "array"}), ["[1,2]", "[1, 2]", "[\r\n\t1,\r\n\t2\r\n]"], ["[1,  2]", "[\n\n1]", " []"]),
    ],
    ids=["regex", "lark", "choice", "object", "white space"],
)
def test_only_texts_that_match_are_accepted(
    grammars: Grammars, grammar: Grammar, good: list[str], bad: list[str]
) -> None:
    assert [text for text in good if not accepts(grammars.match(grammar), text)] == []
    assert [text for text in bad if accepts(grammars.match(grammar), text)] == []


def holding(**held: Any) -> dict[str, Any]:
    """A schema of objects that must have each of those properties."""
    return {"type": "object", "properties": held, "required": [*held]}


ROOT, OF_A = {"$ref": "#"}, {"$ref": "#/$defs/A"}
SPELLED = 'a<eos>"b'


@pytest.mark.parametrize(
    "grammar",
    [regex(SPELLED), choice(SPELLED), lark(f"start: {json.dumps(SPELLED)}"), json_grammar({"const": SPELLED})],
)
def test_a_text_that_spells_a_special_token_is_written_in_others(grammars: Grammars, grammar: Grammar) -> None:
    matcher, mask = grammars.match(grammar), np.zeros(VOCAB // 8, np.uint8)
    for byte in (json.dumps(SPELLED) if grammar.kind is GrammarKind.JSON_SCHEMA else SPELLED).encode():
        matcher.fill(mask.ctypes.data, mask.nbytes)
        assert np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist() == [byte]
        assert matcher.consume([byte])


def test_a_copy_goes_its_own_way_and_tokens_that_do_not_match_are_refused(grammars: Grammars) -> None:
    first = grammars.match(regex("ab|ac"), b"a")
    second = first.copy()
    assert first.consume(b"b")
    assert first.ended
    assert not second.ended
    assert second.consume(b"c")
    with pytest.raises(FieldOutOfRange, match="do not match"):
        grammars.match(regex("ab"), b"ba")


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (regex("(a"), "unclosed group"),
        (lark("start: missing"), "missing"),
        (json_grammar({"not": {"type": "string"}}), "Unimplemented keys"),
        (json_grammar({"$ref": "#"}), r"at \$ref: a \$ref refers to itself"),
        (json_grammar({**OF_A, "$defs": {"A": {"anyOf": [OF_A]}}}), r"A\.anyOf\.0\.\$ref: a \$"),
        (json_grammar({**OF_A, "$defs": {"A": holding(n={}, a=OF_A)}}), r"\$defs\.A\.properties\.a\.\$ref: a"),
        (json_grammar(holding(a={"anyOf": [holding(b=ROOT), ROOT]})), r"anyOf\.0\.properties\.b\.\$ref: a \$ref"),
        (json_grammar({"allOf": [{"type": "array", "items": ROOT, "minItems": 1}]}), r"at allOf\.0\.items\.\$ref: a"),
        (
            json_grammar({**holding(), "additionalProperties": ROOT, "minProperties": 1}),
            r"at additionalProperties\.\$r",
        ),
        (json_grammar({"properties": {"a": {}, "b": {"type": "array", "items": "x"}}}), r"at properties\.b\.items: "),
        (json_grammar({"anyOf": [{}, {"properties": []}], "$defs": {}}), r"at anyOf\.1\.properties: "),
        (json_grammar({"description": "x" * MAX_CHARACTERS}), f"at most {MAX_CHARACTERS}"),
        (json_grammar({"enum": ["\ud800"]}), "hex escape"),
        (regex("((a{100}){100}){100}"), "more than|too many"),  # of time, or of expressions on a fast processor
        (json_grammar({"properties": {f"p{i}": {} for i in range(9000)}}), "more than"),
    ],
)
def test_what_cannot_be_compiled_is_refused_soon_by_its_field(grammars: Grammars, grammar: Grammar, says: str) -> None:
    with pytest.raises(FieldOutOfRange, match=says) as caught:
        grammars.compile(grammar).result(TIMEOUT_S)
    assert caught.value.param == grammar.field
    assert caught.value.message.startswith(grammar.field)


@pytest.mark.parametrize(
    "grammar",
    [
        json_grammar({"enum": [f"value {i * 7919}" for i in range(10_000)]}),
        json_grammar({"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}),
        regex("(.*a){500}"),
        json_grammar({"enum": [{"$ref": "#/enum/0"}]}),
        json_grammar(holding(a={"anyOf": [ROOT, {"type": "null"}]}, b={"type": "array", "items": ROOT})),
    ],
)
def test_large_grammars_compile_soon(grammars: Grammars, grammar: Grammar) -> None:
    grammars.compile(grammar).result(TIMEOUT_S)


def test_a_vocabulary_that_cannot_be_read_is_told_of_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """Here one of more tokens than the logits have."""
    grammars = Grammars(resolve("random:tiny-llama", cache_dir=Path()), 1)
    grammars.prepare()
    grammars.compile(regex("a")).exception()  # in the same thread, after it
    grammars.close()
    assert "vocabulary cannot be read" in caplog.text


def test_all_parts_at_fault_are_found_at_once(grammars: Grammars) -> None:
    odd: list[Any] = [holding(a=ROOT), {"items": [1]}]
    schemas: Any = {f"p{number}": odd[number // 2 % 2] if number % 2 else {} for number in range(9)}
    parts = tuple((name, Grammar(GrammarKind.JSON_SCHEMA, json.dumps(each), name)) for name, each in schemas.items())
    error = grammars.compile(Grammar(GrammarKind.LARK, "start: absent", "tools", parts)).exception(TIMEOUT_S)
    assert isinstance(error, RefusedGrammar)
    assert (error.param, error.odd) == ("p1", ["p1", "p3", "p5", "p7"])
    assert error.message.startswith("p1: p1: at properties.a.$ref: a $ref refers to itself")


def slow(name: str) -> Grammar:
    return regex(f"{name}((b{{100}}){{100}}){{100}}")


def test_a_full_queue_refuses_and_a_cancelled_compilation_leaves_it(grammars: Grammars) -> None:
    waiting = [grammars.compile(slow(f"w{number}")) for number in range(MAX_WAITING)]
    with pytest.raises(Busy, match=f"{MAX_WAITING} grammars wait") as caught:
        grammars.compile(regex("one more"))
    assert (caught.value.retry_after_s or 0) > 0
    assert sum(each.cancel() for each in waiting) >= MAX_WAITING - 1
    grammars.compile(regex("one more")).result(TIMEOUT_S)


def test_a_refused_grammar_is_refused_again_at_once_and_does_not_spoil_the_next(grammars: Grammars) -> None:
    refused = grammars.compile(slow("again"))
    assert accepts(grammars.match(regex("quick")), "quick")
    first = refused.exception()
    answer = grammars.compile(Grammar(GrammarKind.REGEX, slow("again").text, "other"))
    assert answer.done()
    again = answer.exception()
    assert isinstance(first, FieldOutOfRange)
    assert isinstance(again, FieldOutOfRange)
    assert again.param == "other"  # the field of now
    assert again.message == first.message.replace("structured_outputs.regex", "other")
