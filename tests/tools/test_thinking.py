"""Models that think: what is read as thoughts, what a template can do, and grammars that wait for the answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.domain.errors import FieldOutOfRange
from app.domain.values import Grammar, GrammarKind
from app.messages import TurnFinished
from app.text.generation import TextChunk
from app.tools.definitions import Tool, ToolMode, ToolUse
from app.tools.formats import HARMONY, TOOL_FORMATS, ToolFormat
from app.tools.reader import CallArguments, Content
from app.tools.support import ToolSupport, turn_grammar
from app.tools.thinking import Opening, Seal, Wish, kept_secret
from tests.tools.calls import ALL_FORMATS, reader_of, takes, write
from tests.tools.test_cuts import CUT, USE, Told
from tests.tools.test_cuts import STOPPED as END
from tests.tools.test_offering import support, tokens

TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
QWEN = (
    "{% for m in messages %}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
ALWAYS = TURNS + "{% if add_generation_prompt %}assistant:<think>\n{% endif %}{# </think> #}"
GPT_OSS = TURNS + "Reasoning: {{ reasoning_effort }}<|end|><|start|>assistant{# <|channel|>analysis<|message|> #}"
BEGUN = "<|end|><|start|>assistant"
CHAT = [{"role": "user", "content": "Hi"}]


QWEN_MODEL, OSS_MODEL = support(QWEN), support(GPT_OSS)
OF_TOKENS = support(QWEN, "<think>", "</think>")


CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
FREE, OPEN = Opening.FREE, Opening.OPEN
ANALYSIS, FINAL = "<|channel|>analysis<|message|>Hm", "<|start|>assistant<|channel|>final<|message|>Yes"


@pytest.mark.parametrize(
    ("model", "opening", "text", "end", "said"),
    [
        (QWEN_MODEL, FREE, "<think>\nHm.\n</think>\n\nYes.", END, ("Hm.", "Yes.", [])),
        (QWEN_MODEL, FREE, "Yes <think>no</think>", END, ("", "Yes <think>no</think>", [])),
        (QWEN_MODEL, FREE, "<think>a <think> b</think>c</think>d", END, ("a <think> b", "c</think>d", [])),
        (QWEN_MODEL, FREE, f"<think>{CALL}</think>{CALL}", END, (CALL, "", ["f"])),
        (QWEN_MODEL, FREE, "<think>a</think>\n<think>b</think>c", END, ("a\nb", "c", [])),
        (QWEN_MODEL, FREE, "<think>never </thi", END, ("never </thi", "", [])),
        (QWEN_MODEL, FREE, "<thi", END, ("", "<thi", [])),
        (QWEN_MODEL, FREE, "<thi", CUT, ("", "", [])),
        (QWEN_MODEL, OPEN, "\nHm.</think>Yes.", END, ("Hm.", "Yes.", [])),
        (QWEN_MODEL, OPEN, "<think>Hm.</think>Yes.", END, ("Hm.", "Yes.", [])),
        (QWEN_MODEL, OPEN, "Hm.</thi", CUT, ("Hm.", "", [])),
        (OF_TOKENS, FREE, "<thi", CUT, ("", "<thi", [])),
        (OF_TOKENS, FREE, "<think>a </", CUT, ("a </", "", [])),
        (OSS_MODEL, FREE, f"{ANALYSIS}<|end|>{FINAL}", END, ("Hm", "Yes", [])),
        (OSS_MODEL, FREE, f"{ANALYSIS}{FINAL}", END, ("Hm", "Yes", [])),
        (OSS_MODEL, FREE, " to=functions.f<|channel|>commentary json<|message|>{}<|call|>", END, ("", "", ["f"])),
        (OSS_MODEL, FREE, "<|channel|>commentary to=functions.nope <|message|>{}<|call|>", END, ("", "{}", [])),
        (OSS_MODEL, FREE, "<|channel|>commentary to=functions.f <|message|>[<|call|>", END, ("", "[", [])),
        (OSS_MODEL, FREE, "Plain text.", END, ("", "Plain text.", [])),
    ],
)
def test_thoughts_are_what_comes_first_between_the_markers(
    model: ToolSupport, opening: Opening, text: str, end: TurnFinished, said: Any
) -> None:
    for chunks in ([TextChunk(text)], [TextChunk(character) for character in text]):
        found = Told(model.answer(USE, has_form=False, opening=opening)).take(*chunks, end)
        assert (found.thoughts, found.content, [name for name, _ in found.calls]) == said


@pytest.mark.parametrize(
    ("model", "text", "count", "before"),
    [
        (QWEN_MODEL, "<think>Hm, é</think>Yes", 21, 21),
        (QWEN_MODEL, "<think>Hm, é</think>\n Yes", 21, 23),
        (QWEN_MODEL, "<think>Hm", 9, 9),
        (QWEN_MODEL, "Yes", 0, 0),
        (OSS_MODEL, f"{ANALYSIS}<|end|>{FINAL}", len(f"{ANALYSIS}<|end|>"), len(f"{ANALYSIS}<|end|>{FINAL}") - 3),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 99])
def test_the_tokens_of_thoughts_are_counted_to_their_end_however_they_come(
    model: ToolSupport, text: str, count: int, before: int, size: int
) -> None:
    answer, ids = model.answer(USE, has_form=False), text.encode()
    for start in range(0, len(ids), size):
        answer.pieces(TextChunk("" if size < 99 else text, tuple(ids[start : start + size])))
    answer.pieces(TextChunk(text if size < 99 else ""))
    assert (answer.reasoning_tokens, answer.tokens_before_content) == (count, before)


def test_a_name_that_no_family_has_is_refused() -> None:
    with pytest.raises(FieldOutOfRange, match="hermes"):
        ToolSupport(tokens(QWEN), "hermes+nothing")


@pytest.mark.parametrize(
    ("template", "wish", "end", "ignored"),
    [
        (QWEN, Wish({"enable_thinking": False}), "</think>\n\n", ()),
        (QWEN, Wish({"enable_thinking": False, "x": 1}), "</think>\n\n", ("chat_template_kwargs.x",)),
        (QWEN, Wish({"messages": []}), "assistant:", ("chat_template_kwargs",)),
        (QWEN, Wish(effort="none"), "</think>\n\n", ()),
        (QWEN, Wish({"enable_thinking": True}, effort="none"), "assistant:", ()),
        (QWEN, Wish(thinks=False), "</think>\n\n", ()),
        (QWEN, Wish(thinks=True, budget=9), "assistant:", ("thinking_budget",)),  # no token ends the thoughts
        (ALWAYS, Wish(thinks=False, effort="low"), "<think>\n", ("reasoning_effort", "thinking")),
        (GPT_OSS, Wish(effort="high"), f"Reasoning: high{BEGUN}", ()),
        (GPT_OSS, Wish(effort="none"), f"Reasoning: low{BEGUN}", ()),
        (TURNS, Wish(effort="none", thinks=False), "Hi\n", ()),
        (TURNS, Wish({"a": 1}, "low"), "\n", ("chat_template_kwargs", "reasoning_effort")),
        (TURNS, Wish(thinks=True, budget=5), "\n", ("thinking",)),
    ],
)
def test_a_wish_is_heeded_as_far_as_the_template_can(template: str, wish: Wish, end: str, ignored: Any) -> None:
    model = support(template)
    heeded = model.heed(wish)
    text = model.chat_text(CHAT, [], variables=heeded.variables)
    assert text.endswith(end)
    assert heeded.ignored == ignored
    openings = {"assistant:": FREE, BEGUN: FREE, "</think>\n\n": Opening.CLOSED, "<think>\n": OPEN}
    assert model.opening(text) is next((each for sign, each in openings.items() if text.endswith(sign)), Opening.CLOSED)
    assert model.reads_thoughts is (template == QWEN)


THINK_END, OPEN_ID = 300, 301


def allows(grammar: Grammar | None, *parts: str | int) -> bool:
    return grammar is not None and takes(grammar.text, *parts)


SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "integer"}), "response_format")
REQUIRED = ToolUse((Tool("f"),), ToolMode.REQUIRED, frozenset({"f"}))


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        (SCHEMA, "12"),
        (Grammar(GrammarKind.REGEX, "a/b+", "x"), "a/bb"),
        (Grammar(GrammarKind.CHOICE, '["yes", "no"]', "x"), "yes"),
        (Grammar(GrammarKind.LARK, 'start: THOUGHT\nTHOUGHT: "xy"', "x"), "xy"),
        (None, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
    ],
)
@pytest.mark.parametrize("has_tokens", [True, False])
def test_a_grammar_begins_after_the_thoughts(form: Grammar | None, answer: str, has_tokens: bool) -> None:
    model = support(QWEN, *(("</think>", "<think>") if has_tokens else ()))
    use = ToolUse() if form else REQUIRED
    begin, end = (OPEN_ID, THINK_END) if has_tokens else ("<think>", "</think>")
    free, opened, closed = (turn_grammar(form, use, model, opening) for opening in Opening)
    assert allows(free, begin, "Hm {", end, answer)
    assert allows(free, answer)
    assert allows(opened, "Hm {", end, "\n\n", answer)
    assert not allows(opened, answer)
    assert not allows(opened, "Hm", end, "no such thing")
    if form is None or form.kind is GrammarKind.LARK:
        assert allows(closed, answer)
    assert support(TURNS).after_thinking(form, Opening.FREE, None) is form


def test_a_budget_ends_the_thoughts_and_nothing_else() -> None:
    model = support(QWEN, "</think>", "<think>")
    assert model.heed(Wish(budget=3)).budget == 3
    for opening, begin in ((Opening.OPEN, ()), (Opening.FREE, (OPEN_ID,))):
        free = turn_grammar(None, ToolUse(), model, opening, 3)
        assert allows(free, *begin, "abc", THINK_END, "a long answer <tool_call>")
        assert allows(free, *begin, "a", THINK_END, "")
        assert not allows(free, *begin, "abcd", THINK_END, "so")
        held = turn_grammar(SCHEMA, ToolUse(), model, opening, 3)
        assert allows(held, *begin, "abc", THINK_END, "12")
    assert allows(turn_grammar(None, ToolUse(), model, Opening.FREE, 3), "no thoughts at all")
    assert turn_grammar(None, ToolUse(), model, Opening.CLOSED, 3) is None


FIELDS = {"text": {"type": "string"}, "n": {"type": "integer"}, "kind": {"enum": ["a", "b"]}, "way": {"const": "w"}}
SUM = Tool("sum", None, {"properties": FIELDS, "required": ["text"]})


@ALL_FORMATS
@pytest.mark.parametrize("has_tokens", [True, False])
def test_a_call_that_a_grammar_holds_is_in_the_familys_form_after_its_thoughts(
    form: ToolFormat, has_tokens: bool
) -> None:
    """Its markers may be tokens, which no text spells."""
    name = form.name if form is HARMONY else f"{form.name}+think"
    markers = sorted(form.markers | {"<think>", "</think>"}) if has_tokens else []
    known = tokens(QWEN, *markers)
    model, thought = (
        ToolSupport(known, name),
        f"{ANALYSIS}<|end|><|start|>assistant" if form is HARMONY else "<think>Hm</think>",
    )
    grammar = turn_grammar(None, ToolUse((SUM,), ToolMode.REQUIRED, frozenset({"sum"})), model, FREE)
    for arguments in ('{"text": "l1\\nl2 <", "n": 3, "kind": "a", "way": "w"}', '{"text": ""}'):
        call = write(form, ("sum", arguments))
        assert all(allows(grammar, *known.encode(said + call, add_special_tokens=False)) for said in ("", thought))
        reader = reader_of(form, [SUM])
        told = [each.text for each in (*reader.push(call), *reader.finish()) if isinstance(each, CallArguments)]
        assert form is HARMONY or json.loads("".join(told)) == json.loads(arguments)
    for wrong in ('{"n": 3}', '{"text": "x", "n": "y"}', '{"text": "x", "kind": "c"}', '{"text": "x", "way": "x"}'):
        assert not allows(grammar, *known.encode(thought + write(form, ("sum", wrong)), add_special_tokens=False))


CODED = "<tool_call><function=edit>\n<parameter=text>\n1\n2\n</parameter>\n<parameter=n>3</parameter></function>"
PARAMETERS = {"text": {"type": "string"}, "n": {"type": ["integer", "null"]}, "e": {"$ref": "#/$defs/E"}}
EDIT = Tool("edit", None, {"properties": PARAMETERS, "$defs": {"E": {"allOf": [{"enum": [3]}]}}})


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("lfm2", "<|tool_call_start|>[f(b='x', c=[1, True, null])]<|tool_call_end|>", {"b": "x", "c": [1, True, None]}),
        ("gemma4", '<|tool_call>call:f{a:<|"|>x: "{<|"|>,b:{c:[1]}}<tool_call|>', {"a": 'x: "{', "b": {"c": [1]}}),
        ("gemma4", '<|tool_call>call:f{"a": "{b: 1}"}<tool_call|>', {"a": "{b: 1}"}),
        ("kimi_k2", '<|tool_call_begin|>functions.f:12<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>', {"a": 1}),
        (
            "glm",
            "<tool_call>f<arg_key>a</arg_key><arg_value></tool_call> </arg_value></tool_call>",
            {"a": "</tool_call> "},
        ),
        ("mistral", '[TOOL_CALLS]edit[CALL_ID]a1[ARGS]{"n": 1}', {"n": 1}),
        ("qwen3_coder", CODED, {"text": "1\n2", "n": 3}),
        ("qwen3_coder", CODED.replace("3<", "3e999<"), {"text": "1\n2", "n": "3e999"}),
        ("qwen3_coder", CODED.replace("=n", "=e"), {"text": "1\n2", "e": 3}),
        ("lfm2", '<|tool_call_start|>[f(a="1\n2", **{"b": 1})]<|tool_call_end|>', {"a": "1\n2", "b": 1}),
        ("lfm2", "<|tool_call_start|>[f(a='x', # it's\n b=1)]<|tool_call_end|>", {"a": "x", "b": 1}),
        ("qwen3_coder", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', {"a": 1}),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>\n  x\n</parameter></function>", {"a": "  x"}),
    ],
)
def test_calls_are_read_as_models_write_them(name: str, text: str, arguments: Any) -> None:
    form = next(each for each in TOOL_FORMATS if each.name == name)
    for size in (1, 999):
        reader = reader_of(form, [EDIT, Tool("f")])
        pieces = [piece for at in range(0, len(text), size) for piece in reader.push(text[at : at + size])]
        pieces += reader.finish()
        assert [json.loads(each.text) for each in pieces if isinstance(each, CallArguments)] == [arguments]
        assert not any(isinstance(each, Content) for each in pieces)


def test_sealed_thoughts_are_opened_by_the_server_that_sealed_them(tmp_path: Path) -> None:
    seal = Seal(kept_secret(tmp_path))
    for text in ("", "Hm.", "é" * 5000):
        sealed = seal.close(text)
        assert seal.close(text) != sealed
        assert Seal(kept_secret(tmp_path)).open(sealed) == text
        assert Seal().open(sealed) is None
        assert seal.open(sealed[:-8] + "AAAAAAA=") is None
        assert seal.of("a").open(seal.of("a").close(text)) == text
        assert seal.of("b").open(seal.of("a").close(text)) is None
    for foreign in ("", "EqQBCg==", "é", "x" * 41):
        assert seal.open(foreign) is None
