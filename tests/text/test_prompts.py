"""Chats are rendered as Transformers renders them, in a sandbox, and turns by messages add up to the conversation."""

import json
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from app.domain.errors import MalformedRequest
from app.domain.values import FinishReason, Ticket, TurnUsage
from app.messages import TurnFinished
from app.model_store.resolve import resolve
from app.model_store.saved import ModelTokenizer
from app.routers.turns import following_token_ids, new_token_ids
from app.settings import Settings
from app.text.chat_template import ChatTemplate
from app.text.generation import TextChunk
from app.text.tokenizer import Tokens, load_tokens
from app.tools.definitions import Tool, ToolMode, ToolUse
from app.tools.reader import CallArguments
from app.tools.support import ToolSupport
from app.wire.turns import GenerateBody
from tests.hugging_face import byte_tokenizer
from tests.text.family_templates import FAMILIES

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
    return ChatTemplate(source, ModelTokenizer.of(byte_tokenizer(512)).special_tokens)


ARGUMENTS = {"path": "a b.py", "lines": 3}
CALL = {"id": "call00001", "type": "function", "function": {"name": "read", "arguments": ARGUMENTS}}
ASKED: dict[str, Any] = {"role": "user", "content": "Read it."}
CALLS: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "Look.", "tool_calls": [CALL]}
TOLD: dict[str, Any] = {"role": "tool", "tool_call_id": "call00001", "content": "1 < 2"}
READ = Tool("read", None, {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}})


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_rendered_as_transformers_does_and_their_calls_are_read(family: str) -> None:
    name, source = FAMILIES[family]
    for chat in ([ASKED], [ASKED, CALLS, TOLD], [ASKED, CALLS, TOLD, REPLY, ASKED]):
        for opened in (False, True):
            found = template(source).render(chat, [TOOL], add_generation_prompt=opened, continue_final_message=False)
            assert found == expected(source, chat, [TOOL], add_generation_prompt=opened)
    tokenizer = byte_tokenizer(512)
    tokenizer.chat_template = source
    support = ToolSupport(Tokens(ModelTokenizer.of(tokenizer), frozenset({257})))
    assert support.format_name == name
    before, after = (expected(source, chat, [], add_generation_prompt=True) for chat in ([ASKED], [ASKED, CALLS]))
    written = expected(source, [ASKED, CALLS], [], add_generation_prompt=False)
    assert after.startswith(written)
    assert written.startswith(before)
    use = ToolUse((READ,), ToolMode.AUTO, frozenset({"read"}))
    answer = support.answer(use, has_form=False, opening=support.opening(before))
    end = TurnFinished(Ticket(1), FinishReason.STOP, TurnUsage(1, 0, 9, 0), 10)
    pieces = [piece for item in (TextChunk(written[len(before) :]), end) for piece in answer.pieces(item)]
    assert answer.calls == ["read"]
    assert json.loads("".join(piece.text for piece in pieces if isinstance(piece, CallArguments))) == ARGUMENTS


@pytest.mark.parametrize("source", [SIMPLE, TRIMMING, TOOLS])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [[], [TOOL, TOOL]])
@pytest.mark.parametrize("opened", [False, True])
def test_chats_are_those_of_transformers(
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


FIRST = [{"role": "user", "content": "What is 2 + 2?"}]
SAID = "4, as far as I know."
SECOND = [{"role": "user", "content": "And 3 + 3?"}]


@pytest.fixture(scope="module")
def byte_tokens() -> Tokens:
    return load_tokens(resolve("random:tiny-llama", cache_dir=Settings().cache_dir))


def check_second_turn_equals_a_full_render(tokens: Tokens) -> None:
    reply = tokens.encode(SAID, add_special_tokens=False)
    (end,) = tokens.encode("<|im_end|>", add_special_tokens=False)
    whole = tokens.render_chat([*FIRST, {"role": "assistant", "content": SAID}, *SECOND])
    for history in (tokens.render_chat(FIRST) + reply, [*tokens.render_chat(FIRST), *reply, end]):
        assert history + following_token_ids(SECOND, tokens, history[-1]) == whole


def test_turns_by_messages_add_up_to_the_whole_conversation(byte_tokens: Tokens) -> None:
    check_second_turn_equals_a_full_render(byte_tokens)


@pytest.mark.model
def test_so_they_do_with_smollm2s_template_which_writes_a_system_prompt_once(smollm: Tokens) -> None:
    check_second_turn_equals_a_full_render(smollm)
    assert "system" in smollm.decode(smollm.render_chat(FIRST), skip_special_tokens=False)
    following = following_token_ids(SECOND, smollm, last_token_id=0)
    assert "system" not in smollm.decode(following, skip_special_tokens=False)
    own = following_token_ids([{"role": "system", "content": "Be brief."}, *SECOND], smollm, last_token_id=0)
    assert "Be brief." in smollm.decode(own)


def tokens_with(template: str | None) -> Tokens:
    tokenizer = byte_tokenizer(512)
    tokenizer.chat_template = template
    return Tokens(ModelTokenizer.of(tokenizer), frozenset())


def body(**fields: object) -> GenerateBody:
    return GenerateBody.model_validate(fields)


def test_a_prompt_gets_the_leading_special_token_only_at_the_start(byte_tokens: Tokens) -> None:
    fresh = new_token_ids(body(prompt="ab"), byte_tokens, [], 512, 4096)
    later = new_token_ids(body(prompt="ab"), byte_tokens, [1, 2], 512, 4096)
    assert fresh == [byte_tokens.bos_token_id, *later]
    assert byte_tokens.decode(later) == "ab"


def test_a_template_that_drops_earlier_replies_is_no_bug_of_the_server() -> None:
    with pytest.raises(MalformedRequest, match="earlier replies") as refused:
        following_token_ids(SECOND, tokens_with("{{ messages[-1].content }}"), last_token_id=0)
    assert refused.value.param == "messages"


@pytest.mark.parametrize("history", [[], [1]])
def test_messages_without_a_chat_template_are_refused(history: list[int]) -> None:
    with pytest.raises(MalformedRequest, match="chat template"):
        new_token_ids(body(messages=FIRST), tokens_with(None), history, 512, 4096)
