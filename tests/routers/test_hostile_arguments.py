"""Arguments of calls that are made to break the server, and are sent back to it: a refusal, or an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.openai.reference import save_tiny_model
from tests.routers.hostile import ASKED, CHAT, DEEP, RESPONSES, TIMEOUT_S, assert_refused, send
from tests.serving import serve

MAX_LEN = 16_384
"""Room for the deepest arguments, each byte of which is a token. In a JSON text they have a third more."""
WRITES_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module", params=[None, WRITES_CALLS], ids=["knows no calls", "writes calls"])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A server for each kind of chat template."""
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(folder, max_model_len=MAX_LEN)
    if request.param is not None:
        (folder / "chat_template.jinja").write_text(request.param)
    with (
        serve(model=str(folder), max_model_len=MAX_LEN, kv_device=32 << 20) as url,
        httpx.Client(base_url=url, timeout=TIMEOUT_S) as client,
    ):
        yield client


def nested(depth: int) -> str:
    """Objects that stand in each other so deep."""
    return '{"a":' * depth + "1" + "}" * depth


ARGUMENTS = {
    "nothing": "",
    "cut off": '{"a": [1, {"b": "c',
    "null": "null",
    "a list": "[1]",
    "not a number": '{"a": NaN}',
    "infinite": '{"a": 1e999}',
    "a long number": '{"a": ' + "1" * 5000 + "}",
    "twice the same name": '{"a": 1, "a": 2}',
    "control characters": '{"a": "\x00\x1f"}',
    **{f"{depth} levels": nested(depth) for depth in (80, 150, 950)},
}


def chat_with(arguments: str) -> tuple[str, dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "1"}
    return CHAT, {"messages": [*ASKED, said, result], "max_tokens": 2}


def response_with(arguments: str) -> tuple[str, dict[str, Any]]:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": arguments}
    result = {"type": "function_call_output", "call_id": "c1", "output": "1"}
    return RESPONSES, {"input": [*ASKED, call, result], "max_output_tokens": 2}


both = pytest.mark.parametrize("sent", [chat_with, response_with], ids=lambda sent: sent.__name__)


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_malformed_arguments_may_be_sent_back(client: httpx.Client, arguments: str) -> None:
    """A model wrote them: a client that cannot send them back is at the end of its conversation."""
    for sent in (chat_with, response_with):
        answer = send(client, *sent(arguments))
        assert answer.status_code == 200, answer.text


@both
def test_arguments_that_are_no_text_are_refused(client: httpx.Client, sent: Any) -> None:
    path, body = sent("\ud800")
    assert assert_refused(path, send(client, path, body))


@both
def test_arguments_without_room_in_the_context_are_refused(client: httpx.Client, sent: Any) -> None:
    path, body = sent(DEEP)
    assert "context" in assert_refused(path, send(client, path, body))
