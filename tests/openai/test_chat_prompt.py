"""What a chat template leaves out is refused, and what it writes goes through."""

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


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{**USER, "name": "Ada"}], "messages.0.name"),
        ([{"role": "system", "content": "Be kind.", "name": "boss"}, USER], "messages.0.name"),
        ([USER, {"role": "assistant", "content": "Now.", "name": "Bob"}, USER], "messages.1.name"),
        (TOOL_CHAT, "messages.1.tool_calls"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_what_the_template_leaves_out_is_refused(http: httpx.Client, path: str, messages: Any, param: str) -> None:
    response = http.post(path, json={"model": MODEL, "messages": messages})
    assert "template" in assert_error(response, 422, "field_out_of_range", param=param)


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
