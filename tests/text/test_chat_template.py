"""Chats are rendered as Transformers renders them; a template cannot reach out of its sandbox."""

from __future__ import annotations

from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from app.model_store.byte_tokenizer import byte_tokenizer
from app.model_store.model_tokenizer import ModelTokenizer
from app.text.chat_template import ChatTemplate
from app.text.tokenizer import Tokens

SIMPLE = """\
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {{- bos_token + message['role'] + ':' + (message.content if message.content is string else '') }}
    {%- if message.content is not string and message.content is defined %}
        {%- for part in message.content %}{{ part.text }}{% endfor %}
    {%- endif %}
    {%- if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{% endif %}
    {% generation %}{{ message.thinking }}{% endgeneration %}
    {%- if message.content is none %}null{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}
"""
TRIMMING = "{% for message in messages %}[{{ message.content | trim }}]\n{% endfor %}"
TOOLS = """\
{%- set seen = namespace(count=0, self=1) %}
{%- set more = dict(a=1) %}
{%- for tool in tools or [] %}
    {%- set seen.count = seen.count + 1 %}
    {{- tool | tojson }}{{ tool | tojson(indent=2) }}{{ seen.count }}{{ more.a }}{{ dict.fromkeys(['x'], 2).x }}
{%- else %}none{% endfor %}{{ documents is none }}{{ eos_token }}
"""
USER = {"role": "user", "content": "Grüße <b> & 'x'", "name": None}
REPLY = {"role": "assistant", "content": "Once upon "}
THOUGHT = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": None}
PARTS = {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
SPACED = {"role": "assistant", "content": "  both  "}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"é": "<tag>"}}}
CHATS: list[list[dict[str, Any]]] = [[USER], [USER, REPLY], [USER, THOUGHT, {"role": "tool", "content": "1"}, PARTS]]


def expected(source: str, chat: list[dict[str, Any]], tools: list[dict[str, Any]], **options: bool) -> str:
    tokenizer: Any = byte_tokenizer(512)
    text = tokenizer.apply_chat_template(chat, chat_template=source, tools=tools or None, tokenize=False, **options)
    assert isinstance(text, str)
    return text


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, ModelTokenizer.of(byte_tokenizer(512)).facts.special_tokens)


@pytest.mark.parametrize("source", [SIMPLE, TRIMMING, TOOLS])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [[], [TOOL, TOOL]])
@pytest.mark.parametrize("opened", [False, True])
def test_a_chat_has_the_text_of_transformers(
    source: str, chat: list[dict[str, Any]], tools: list[dict[str, Any]], opened: bool
) -> None:
    found = template(source).render(chat, tools, add_generation_prompt=opened, continue_final_message=False)
    assert found == expected(source, chat, tools, add_generation_prompt=opened)


@pytest.mark.parametrize(
    ("source", "final"), [(SIMPLE, REPLY), (SIMPLE, SPACED), (SIMPLE, PARTS), (TRIMMING, REPLY), (TRIMMING, SPACED)]
)
def test_a_message_that_is_left_open_ends_as_in_transformers(source: str, final: dict[str, Any]) -> None:
    before = dict(final)
    found = template(source).render([USER, final], [], add_generation_prompt=False, continue_final_message=True)
    assert found == expected(source, [USER, final], [], continue_final_message=True)
    assert final == before


@pytest.mark.parametrize("source", ["{{ messages[-1].role }}", "{{ messages[-1].content | upper }}"])
def test_a_message_that_the_template_changes_cannot_be_left_open(source: str) -> None:
    with pytest.raises(ValueError, match="cannot be continued"):
        template(source).render([USER, REPLY], [], add_generation_prompt=False, continue_final_message=True)


def test_a_template_refuses_a_chat_in_its_own_words() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        template("{{ raise_exception('roles must alternate') }}").render(
            [USER], [], add_generation_prompt=True, continue_final_message=False
        )


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ dict.__class__.__bases__ }}",
        "{% set a = namespace(__class__=1) %}",
        "{% set a = namespace() %}{% set a._x = 1 %}",
        "{{ strftime_now.__globals__.os }}",
    ],
)
def test_a_template_cannot_reach_into_python(source: str) -> None:
    with pytest.raises(SecurityError):
        template(source).render([USER], [], add_generation_prompt=True, continue_final_message=False)


def test_of_several_templates_one_is_for_tools() -> None:
    tokenizer: Any = byte_tokenizer(512)
    tokenizer.chat_template = {"default": "plain", "tool_use": "tools"}
    tokens = Tokens(ModelTokenizer.of(tokenizer), frozenset())
    assert (tokens.chat_text([USER]), tokens.chat_text([USER], tools=[TOOL])) == ("plain", "tools")
