"""Tools in a chat: how templates of several families show them, and the grammars that hold answers to them."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher
from msgspec import structs
from tokenizers import AddedToken

from app.domain.values import FinishReason, Ticket, TurnUsage
from app.messages import TurnFinished
from app.model_store.saved import ModelTokenizer
from app.model_store.shapes import IM_START_ID
from app.text.generation import TextChunk
from app.text.tokenizer import Tokens
from app.tools.definitions import Tool, ToolMode, ToolUse, check_parameters, messages_for_template
from app.tools.formats import HERMES, LLAMA, MISTRAL, ToolFormat
from app.tools.grammar import call_grammar, foreign_keywords, plain_grammar
from app.tools.lark import START, plain_lark, quoted_lark, quoted_regex
from app.tools.reader import CallArguments, Content
from app.tools.support import ToolSupport
from app.wire.turns import json_form
from tests.hugging_face import byte_tokenizer
from tests.tools.calls import ALL_FORMATS, FORMATS, VOCABULARY, reader_of, takes, write

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NATIVE = (
    "{% if tools %}TOOLS{% for t in tools %} {{ t | tojson }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments['x'] }}{% endfor %}\n"
    "{% endfor %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('only system, user and assistant') }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
)
ADD = Tool("add", "sums two numbers", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
USE = ToolUse((ADD,), ToolMode.AUTO, frozenset({"add"}))
CHAT: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 and 2?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x":  1}'}}],
    },
    {"role": "tool", "content": "3", "tool_call_id": "a"},
    {"role": "tool", "content": "4", "tool_call_id": "b"},
)


def tokens(template: str, *added: str) -> Tokens:
    tokenizer = byte_tokenizer(300)
    tokenizer.add_tokens([AddedToken(text, special=False) for text in added])
    tokenizer.chat_template = template
    return Tokens(ModelTokenizer.of(tokenizer), frozenset({257}))


def support(template: str, *added: str) -> ToolSupport:
    return ToolSupport(tokens(template, *added))


def test_a_template_that_knows_tools_gets_them_as_they_are() -> None:
    native = support(NATIVE)
    text = native.chat_text(CHAT, [ADD])
    assert text.startswith(f"TOOLS {json.dumps(ADD.for_template())}")
    assert "assistant: <tool_call>add 1tool: 3tool: 4" in text


CALLED = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [(each, each) for each in ('{"x": "1', "[1]", "nothing", "[" * 100_000)] + [("", "{}")],
    ids=["cut", "list", "word", "deep", "none"],
)
def test_arguments_that_are_no_object_stay_as_the_model_left_them(arguments: str, shown: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": arguments}}
    chat = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert tokens(CALLED).chat_text(messages_for_template(chat)) == shown
    assert f'{{"name": "add", "arguments": {shown}}}' in support(CHATML).chat_text(chat, [ADD])


@pytest.mark.parametrize("template", [CHATML, ALTERNATING])
def test_another_template_gets_them_as_text(template: str) -> None:
    foreign = support(template)
    text = foreign.chat_text(CHAT, [ADD])
    assert text.index('"sums two numbers"') < text.index("Be brief.") < text.index("1 and 2?")
    assert '<tool_call>\n{"name": "add", "arguments": {"x":  1}}\n</tool_call>' in text
    assert "<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>" in text
    assert "tool: " not in text


def test_a_template_gets_no_more_than_it_lacks() -> None:
    for template in (CHATML, NATIVE, ALTERNATING):
        assert support(template).chat_text(CHAT[:2], []) == tokens(template).chat_text(CHAT[:2])
    text = support(CHATML).chat_text(CHAT[1:2], [ADD], add_generation_prompt=False)
    assert text.startswith("<|im_start|>system\n"), "a chat without a system message gets one for its tools"
    assert text.index('"add"') < text.index("1 and 2?")
    knows_calls_alone = NATIVE.partition("{% endif %}")[2]
    text = support(knows_calls_alone).chat_text(CHAT, [ADD])
    assert text.index('"sums two numbers"') < text.index("Be brief.")
    assert "assistant: <tool_call>add 1tool: 3tool: 4" in text


def test_a_template_whose_calls_are_not_read_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    called = "{% for m in messages %}{% for c in m.tool_calls or [] %}CALL{% endfor %}{{ m.content }}\n{% endfor %}"
    mistral = "[TOOL_CALLS]{{ c.function.name }}{}"
    coder = "<tool_call>\n<function={{ c.function.name }}>\n</function></tool_call>"
    for call in ("<tool_call>" + write(HERMES, ("{{ c.function.name }}", "{}"))[11:], mistral, coder):
        support(called.replace("CALL", call)).check_format()
    assert not caplog.records
    support(called.replace("CALL", "<|call|>{{ c.function.name }}")).check_format()
    assert "in a form that is not read" in caplog.text


def test_a_checkpoint_may_say_itself_how_its_answers_are_read() -> None:
    tokenizer = byte_tokenizer(300)
    called = {"open": "<<", "close": ">>", "content": "json", "repeats": True}
    fields = {"content": {"content": "text"}, "tool_calls": called}
    tokenizer.response_template = {"start_anchor": "assistant:", "fields": fields}
    own = ToolSupport(Tokens(ModelTokenizer.of(tokenizer), frozenset({257})))
    end = TurnFinished(Ticket(1), FinishReason.STOP, TurnUsage(1, 0, 9, 0), 10)
    answer = own.answer(USE, has_form=False)
    pieces = [*answer.pieces(TextChunk('Hm.<<{"name": "add", "arguments": {"a": 1}}>>')), *answer.pieces(end)]
    assert [type(piece).__name__ for piece in pieces] == ["Content", "CallBegun", "CallArguments"]
    assert answer.calls == ["add"]
    for text, ended, content in (
        ('Hm.<<{"name": "f"}>> So.', end, 'Hm.<<{"name": "f"}>> So.'),
        ('Hm.<<{"name": "add", "arg', structs.replace(end, reason=FinishReason.LENGTH), "Hm."),
    ):
        answer = own.answer(USE, has_form=False)
        said = [*answer.pieces(TextChunk(text)), *answer.pieces(ended)]
        assert "".join(piece.text for piece in said if isinstance(piece, Content)) == content
    broken = own.answer(USE, has_form=False)
    said = [piece for item in (TextChunk("Hm.<<oops>> and"), TextChunk(" more"), end) for piece in broken.pieces(item)]
    assert "".join(piece.text for piece in said if isinstance(piece, Content)).endswith("oops>> and more")


FIND = Tool("find", None, {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]})
NAMES = frozenset({"add", "find"})


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


def test_keywords_that_say_nothing_or_that_no_grammar_holds_are_left_out() -> None:
    record = {"type": "object", "propertyNames": {"type": "string"}, "required": None, "uniqueItems": False}
    silent: dict[str, Any] = {"properties": {"required": record, "n": {"enum": [None, 1]}}, "required": ["n"]}
    silent |= {"additionalProperties": None, "type": None}
    assert takes(plain_grammar(json_form(silent, "form")), '{"required": {"a": 1}, "n": null}')
    twice = {"type": "array", "items": {"enum": ["a"], "not": {}}, "uniqueItems": True, "contains": {"const": "a"}}
    key = {"type": ["string", "null"], "format": "jwt", "unevaluatedProperties": {}}
    properties = {"not": twice, "key": key, "n": {"type": "integer", "format": "int64"}}
    foreign = {"properties": properties, "required": ["not"], "if": {}, "then": {"not": {}}}
    places = ["not.items.not", "not.uniqueItems", "not.contains", "key.format", "key.unevaluatedProperties"]
    places = [*(f"properties.{place}" for place in places), "if", "then"]
    for schema, good, wrong, named, of_strict in (
        (silent, '{"required": {"a": 1}, "n": null}', '{"n": 2}', [], []),
        (foreign, '{"not": ["a", "a"], "key": "x"}', '{"not": ["b"]}', places, []),
        ({"properties": {"a": "bar"}}, '{"a": [null]}', '{"b": 1}', ["properties.a"], ["properties.a"]),
    ):
        grammar = grammar_of(
            HERMES, ToolUse.of([Tool("f", None, check_parameters(schema))], ToolMode.REQUIRED, None, parallel=False)
        )
        assert takes(grammar, write(HERMES, ("f", good)))
        assert not takes(grammar, write(HERMES, ("f", wrong)))
        assert foreign_keywords(Tool("f", None, schema)) == named
        assert foreign_keywords(Tool("f", None, schema, strict=True)) == of_strict


@ALL_FORMATS
def test_only_texts_with_a_form_are_held_where_the_model_decides(form: ToolFormat) -> None:
    source = 'start: /[a\\n]+/ (B | "c"i)\nB: "\\"b\\""'
    text_only = {"properties": {"input": {"type": "string"}}, "required": ["input"]}
    larks = {"lark": quoted_lark(source), "plain_lark": plain_lark(source)}
    said = Tool("say", None, text_only, strict=True, **larks)
    other = Tool("f", None, {"type": "object", "not": {}})
    grammar = grammar_of(form, ToolUse.of([said, other], ToolMode.AUTO, None, parallel=True))
    for text in ('a\n"b"', "\n\nC"):
        assert takes(grammar, write(form, ("say", json.dumps({"input": text}))))
    assert takes(grammar, write(form, ("f", '{"any": [1]}')))
    assert takes(grammar, "Just text.")
    for text in ("a", "xc", 'a"b" '):
        assert not takes(grammar, write(form, ("say", json.dumps({"input": text}))))


NO_SCHEMAS: list[Any] = ["bar", 5, [[]], {"type": {"b": 1}}, {"anyOf": 5}, {"enum": "x"}, "x" * 2**20]
NO_SCHEMAS = [{"properties": each} for each in (5, "x", [1], *({"a": each} for each in NO_SCHEMAS))]


@ALL_FORMATS
@pytest.mark.parametrize("schema", [*NO_SCHEMAS, {"required": 5}, {"$defs": 5}], ids=lambda schema: str(schema)[:30])
def test_a_schema_that_is_none_is_the_compilers_to_refuse_and_spoils_no_call(form: ToolFormat, schema: Any) -> None:
    tools, call = [Tool("f", None, schema)], write(form, ("f", '{"a": "b"}'))
    held = grammar_of(form, ToolUse.of(tools, ToolMode.REQUIRED, None, parallel=True))
    assert not foreign_keywords(tools[0]) or takes(held, call), "a value without a schema may be any"
    loose = ToolUse(tuple(tools), ToolMode.AUTO, frozenset("f"), parallel=False, freed=frozenset("f"))
    assert takes(grammar_of(form, loose), call)
    reader = reader_of(form, tools)
    assert [*reader.push(call), *reader.finish()][-1] == CallArguments(0, '{"a": "b"}')


@pytest.mark.timeout(20)
def test_a_long_grammar_costs_no_more_for_each_character() -> None:
    rules = "".join(f"a{number}: a{number + 1}\n" for number in range(20_000))
    assert START in quoted_lark(f'start: a0\n{rules}a20000: "x"')
    for unclosed in ('"' + '\\"' * 50_000, "/" + "\\/" * 50_000):
        assert START in quoted_lark(f"start: {unclosed}")
    assert START in quoted_regex("[x" * 50_000)
