"""What becomes of roles and fields of messages that a chat template writes, leaves out or refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.errors import assert_error
from tests.openai.conftest import MODEL
from tests.openai.reference import Reference, save_tiny_model
from tests.serving import serve

USER = {"role": "user", "content": "What time is it?"}
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ('system', 'user', 'assistant', 'tool', 'critic', 'ghost') %}"
    "{{ raise_exception('only known roles') }}{% endif %}"
    "{% if message['role'] != 'ghost' %}{{ message['role'] + ': ' + message['content'] }}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}"
    "{{ message.reasoning_content or '' }}{{ message.grade or '' }}{{ '\\n' }}{% endfor %}"
)
"""It takes two roles of its own, one of which it leaves out, reads two more fields, and writes calls of tools."""


@pytest.mark.parametrize(
    ("messages", "ignored"),
    [
        ([{"role": "system", "content": "Be kind.", "name": "boss"}, USER], "messages.0.name"),
        ([USER, {"role": "assistant", "content": "Now.", "name": "Bob"}, USER], "messages.1.name"),
        (
            [{**USER, "name": "Ada"}, {**USER, "mood": "sad", "name": "Ada"}],
            "messages.0.name, messages.1.mood, messages.1.name",
        ),
        ([{"role": "narrator", "content": "Night.", "pace": 2}, USER], "messages.0.pace"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_field_that_the_template_leaves_out_is_named(
    http: httpx.Client, path: str, messages: Any, ignored: str
) -> None:
    body = {"model": MODEL, "messages": messages, "return_token_strs": None}
    response = http.post(path, json=body if path == "/tokenize" else {**body, "max_tokens": 1})
    assert response.status_code == 200, response.text
    assert sorted(response.headers["X-Djinn-Ignored"].split(", ")) == sorted(ignored.split(", "))


@pytest.fixture(scope="module")
def choosy_model(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder: Path = tmp_path_factory.mktemp("models") / MODEL
    save_tiny_model(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Reference(folder)


@pytest.fixture(scope="module")
def choosy(choosy_model: Reference) -> Iterator[httpx.Client]:
    """A server of the tiny model with that template."""
    with serve(model=str(choosy_model.folder)) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


def test_calls_that_the_template_writes_are_what_transformers_makes_of_them(
    choosy: httpx.Client, choosy_model: Reference
) -> None:
    def chat(arguments: object) -> list[dict[str, Any]]:
        call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": arguments}}
        answer = {"role": "tool", "tool_call_id": "c1", "content": "12:00"}
        return [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, answer]

    prompt = choosy_model.chat(chat({"zone": "UTC"}))
    assert 'now({"zone": "UTC"})' in choosy_model.decode(prompt)
    body = {"model": MODEL, "messages": chat('{"zone": "UTC"}'), "temperature": 0, "max_tokens": 8}
    answer = choosy.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == choosy_model.decode(choosy_model.greedy(prompt, 8))


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
    assert text_of(choosy, [USER, said]) == ("user: What time is it?\nassistant: Noon.The sun is high.\n", "")


@pytest.mark.parametrize(
    ("roles", "param", "code"),
    [
        (["user", "narrator"], "messages.1.role", "malformed_request"),
        (["critic", "user", "narrator"], "messages.2.role", "malformed_request"),
        (["bard", "user", "narrator"], "messages.0.role", "malformed_request"),
        (["user", "ghost"], "messages.1.role", "field_out_of_range"),
        ([f"role {number}" for number in range(9)], "messages", "field_out_of_range"),
    ],
)
def test_a_role_that_the_template_does_not_write_is_refused(
    choosy: httpx.Client, roles: list[str], param: str, code: str
) -> None:
    messages = [{"role": role, "content": "x"} for role in roles]
    assert_error(choosy.post("/tokenize", json={"messages": messages}), 400, code, param=param)
    without_content = {"messages": [USER, {"role": "critic"}]}
    assert_error(choosy.post("/tokenize", json=without_content), 400, "malformed_request", param="messages")


def test_more_fields_than_are_tried_are_refused_unless_all_are_left_out(choosy: httpx.Client) -> None:
    many = {f"field {number}": number for number in range(9)}
    assert text_of(choosy, [{**USER, **many}])[1].count("messages.0.field?") == 9
    response = choosy.post("/tokenize", json={"messages": [{**USER, **many, "grade": "A"}]})
    assert "at most 8 fields" in assert_error(response, 400, "field_out_of_range", param="messages")
