"""What becomes of roles and fields of messages that a chat template writes, leaves out or refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.errors import assert_error
from tests.openai.conftest import MODEL
from tests.openai.reference import Reference, save_tiny_model
from tests.serving import serve

USER = {"role": "user", "content": "What time is it?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}
TOOL_CHAT: Any = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
]
TOOL_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments | tojson }})"
    "{% endfor %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


PATHS = pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])


@pytest.mark.parametrize(
    ("messages", "ignored"),
    [
        ([{**USER, "name": "Ada"}], "messages.0.name"),
        ([{"role": "system", "content": "Be kind.", "name": "boss"}, USER], "messages.0.name"),
        ([USER, {"role": "assistant", "content": "Now.", "name": "Bob"}, USER], "messages.1.name"),
        (
            [{**USER, "name": "Ada"}, {**USER, "mood": "sad", "name": "Ada"}],
            "messages.0.name, messages.1.mood, messages.1.name",
        ),
        ([{"role": "narrator", "content": "Night.", "pace": 2}, USER], "messages.0.pace"),
    ],
)
@PATHS
def test_a_field_that_the_template_leaves_out_is_named(
    http: httpx.Client, path: str, messages: Any, ignored: str
) -> None:
    response = http.post(path, json={"model": MODEL, "messages": messages, "return_token_strs": None})
    assert response.status_code == 200, response.text
    assert sorted(response.headers["X-Djinn-Ignored"].split(", ")) == sorted(ignored.split(", "))


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The tiny model with a template that writes tool calls."""
    folder: Path = tmp_path_factory.mktemp("models") / MODEL
    save_tiny_model(folder)
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return Reference(folder)


@pytest.fixture(scope="module")
def tool_url(tool_model: Reference) -> Iterator[str]:
    with serve(model=str(tool_model.folder)) as url:
        yield url


def test_what_the_template_writes_is_what_transformers_makes_of_it(tool_url: str, tool_model: Reference) -> None:
    called = {"name": "now", "arguments": {"zone": "UTC"}}
    chat: Any = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": called}]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
    ]
    prompt = tool_model.chat(chat)
    assert 'now({"zone": "UTC"})' in tool_model.decode(prompt)
    with openai.OpenAI(base_url=f"{tool_url}/v1", api_key="none", max_retries=0) as sdk:
        answer = sdk.chat.completions.create(model=MODEL, messages=TOOL_CHAT, temperature=0, max_tokens=8)
    assert answer.choices[0].message.content == tool_model.decode(tool_model.greedy(prompt, 8))


CHOOSY_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] not in ('system', 'user', 'assistant', 'critic', 'ghost') %}"
    "{{ raise_exception('only known roles') }}{% endif %}"
    "{% if message['role'] != 'ghost' %}{{ message['role'] + ': ' + message['content'] }}{% endif %}"
    "{{ message.reasoning_content or '' }}{{ message.grade or '' }}{{ '\n' }}{% endfor %}"
)


@pytest.fixture(scope="module")
def choosy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server whose template takes two roles of its own, one of which it leaves out, and reads two fields."""
    folder: Path = tmp_path_factory.mktemp("models") / MODEL
    save_tiny_model(folder)
    (folder / "chat_template.jinja").write_text(CHOOSY_TEMPLATE)
    with serve(model=str(folder)) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def text_of(http: httpx.Client, messages: list[dict[str, Any]]) -> tuple[str, str]:
    """What the template makes of the messages, and the fields that it left out."""
    response = http.post("/tokenize", json={"messages": messages})
    assert response.status_code == 200, response.text
    text = http.post("/detokenize", json={"tokens": response.json()["tokens"]}).json()["prompt"]
    return text, response.headers.get("X-Djinn-Ignored", "")


def test_a_role_of_the_templates_own_reaches_it_with_its_fields(choosy: httpx.Client) -> None:
    critic = {"role": "critic", "content": [{"type": "text", "text": "Dull."}], "grade": "D", "hat": "grey"}
    assert text_of(choosy, [USER, critic]) == ("user: What time is it?\ncritic: Dull.D\n", "messages.1.hat")


def test_a_field_that_the_template_reads_reaches_it(choosy: httpx.Client) -> None:
    said = {"role": "assistant", "content": "Noon.", "reasoning_content": "The sun is high."}
    assert text_of(choosy, [USER, said])[0].endswith("assistant: Noon.The sun is high.\n")
    assert text_of(choosy, [USER, said])[1] == ""


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        ([USER, {"role": "narrator", "content": "x"}], "messages.1.role", "malformed_request"),
        (
            [{"role": "critic", "content": "x"}, USER, {"role": "narrator", "content": "x"}],
            "messages.2.role",
            "malformed_request",
        ),
        (
            [{"role": "bard", "content": "x"}, USER, {"role": "narrator", "content": "x"}],
            "messages.0.role",
            "malformed_request",
        ),
        ([USER, {"role": "critic"}], "messages", "malformed_request"),
        ([USER, {"role": "ghost", "content": "Boo."}], "messages.1.role", "field_out_of_range"),
        ([{"role": f"role {number}", "content": "x"} for number in range(9)], "messages", "field_out_of_range"),
    ],
)
def test_a_role_that_the_template_does_not_write_is_refused(
    choosy: httpx.Client, messages: Any, param: str, code: str
) -> None:
    assert_error(choosy.post("/tokenize", json={"messages": messages}), 400, code, param=param)


def test_more_fields_than_are_tried_are_refused_unless_all_are_left_out(choosy: httpx.Client) -> None:
    many = {f"field {number}": number for number in range(9)}
    assert text_of(choosy, [{**USER, **many}])[1].count("messages.0.field?") == 9
    response = choosy.post("/tokenize", json={"messages": [{**USER, **many, "grade": "A"}]})
    assert "at most 8 fields" in assert_error(response, 400, "field_out_of_range", param="messages")
