"""Chats with tools in templates of several families."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.model_store.byte_tokenizer import byte_tokenizer
from app.model_store.model_tokenizer import ModelTokenizer
from app.text.tokenizer import Tokens
from app.tools.definitions import Tool, ToolMode, ToolUse
from app.tools.formats import HERMES, LLAMA, MISTRAL, ToolFormat, find_format
from app.tools.pieces import Content
from app.tools.prompt import messages_for_template
from app.tools.support import ToolSupport

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
ADD = Tool("add", "sums two numbers", {"type": "object", "properties": {"x": {"type": "integer"}}})
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


def tokens(template: str) -> Tokens:
    tokenizer = byte_tokenizer(300)
    tokenizer.chat_template = template
    return Tokens(ModelTokenizer.of(tokenizer), frozenset({257}))


def support(template: str) -> ToolSupport:
    return ToolSupport(tokens(template))


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


def test_a_chat_without_tools_is_rendered_as_it_always_was() -> None:
    for template in (CHATML, NATIVE, ALTERNATING):
        assert support(template).chat_text(CHAT[:2], []) == tokens(template).chat_text(CHAT[:2])


def test_a_chat_without_a_system_message_gets_one_for_its_tools() -> None:
    text = support(CHATML).chat_text(CHAT[1:2], [ADD], add_generation_prompt=False)
    assert text.startswith("<|im_start|>system\n")
    assert text.index('"add"') < text.index("1 and 2?")


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (None, HERMES),
        (CHATML, HERMES),
        (NATIVE, HERMES),
        ("{{ '[TOOL_CALLS] [' }}", MISTRAL),
        ("""{{ '{"name": "' + n + '", "parameters": ' }}""", LLAMA),
    ],
)
def test_the_template_tells_the_family(template: str | None, form: ToolFormat) -> None:
    assert find_format(template) is form


def test_a_checkpoint_may_say_itself_how_its_answers_are_read() -> None:
    tokenizer = byte_tokenizer(300)
    called = {"open": "<<", "close": ">>", "content": "json", "repeats": True}
    fields = {"content": {"content": "text"}, "tool_calls": called}
    tokenizer.response_template = {"start_anchor": "assistant:", "fields": fields}
    own = ToolSupport(Tokens(ModelTokenizer.of(tokenizer), frozenset({257})))
    reader: Any = own.reader(USE, has_form=False)
    pieces = [*reader.push('Hm.<<{"name": "f", "arguments": {"a": 1}}>>'), *reader.finish()]
    assert [type(piece).__name__ for piece in pieces] == ["Content", "CallBegun", "CallArguments"]
    assert reader.is_whole
    broken: Any = own.reader(USE, has_form=False)
    said = [*broken.push("Hm.<<oops>> and"), *broken.push(" more"), *broken.finish()]
    assert "".join(piece.text for piece in said if isinstance(piece, Content)).endswith("oops>> and more")


def test_a_template_may_know_calls_but_not_tools() -> None:
    text = support(NATIVE.partition("{% endif %}")[2]).chat_text(CHAT, [ADD])
    assert text.index('"sums two numbers"') < text.index("Be brief.")
    assert "assistant: <tool_call>add 1tool: 3tool: 4" in text
