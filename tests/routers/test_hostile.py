"""Requests that are made to break the server: a refusal in the API's own body, or an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.errors import assert_messages_error
from tests.openai.reference import save_tiny_model
from tests.serving import serve

TIMEOUT_S = 20
"""A refusal takes 2 s at most; a machine that is busy with other tests needs longer."""
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASKED: Any = [{"role": "user", "content": "a"}]
DEEP = "[" * 100_000


def send(client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    """As clients do that check nothing: half of a surrogate pair and NaN are in the text as they are."""
    model = client.get("/v1/models").json()["data"][0]["id"]
    text = json.dumps({"model": model, **body})
    return client.post(path, content=text, headers={"content-type": "application/json"})


def assert_refused(path: str, answer: httpx.Response) -> str:
    """The API's own error body, with 400; returns its message."""
    if path == MESSAGES:
        return assert_messages_error(answer, 400)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "code", "param"}
    message: str = error["message"]
    return message


MAX_LEN = 16_384
"""Room for the deepest arguments, each byte of which is a token. In a JSON text they have a third more."""
WRITES_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@contextmanager
def served(folder: Path, template: str | None = None) -> Iterator[httpx.Client]:
    """A server of a model with room for the deepest arguments, and that chat template."""
    save_tiny_model(folder, max_model_len=MAX_LEN)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    with (
        serve(model=str(folder), max_model_len=MAX_LEN, kv_device=32 << 20) as url,
        httpx.Client(base_url=url, timeout=TIMEOUT_S) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with served(tmp_path_factory.mktemp("models") / "tiny") as http:
        yield http


@pytest.fixture(scope="module", params=["knows no calls", "writes calls"])
def templates(
    request: pytest.FixtureRequest, client: httpx.Client, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A server for each kind of chat template."""
    if request.param == "knows no calls":
        yield client
        return
    with served(tmp_path_factory.mktemp("models") / "calls", WRITES_CALLS) as http:
        yield http


def nested_text(depth: int) -> str:
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
    **{f"{depth} levels": nested_text(depth) for depth in (80, 150, 950)},
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
def test_malformed_arguments_may_be_sent_back(templates: httpx.Client, arguments: str) -> None:
    """A model wrote them: a client that cannot send them back is at the end of its conversation."""
    for sent in (chat_with, response_with):
        answer = send(templates, *sent(arguments))
        assert answer.status_code == 200, answer.text


@both
def test_arguments_that_are_no_text_are_refused(templates: httpx.Client, sent: Any) -> None:
    path, body = sent("\ud800")
    assert assert_refused(path, send(templates, path, body))


@both
def test_arguments_without_room_in_the_context_are_refused(templates: httpx.Client, sent: Any) -> None:
    path, body = sent(DEEP)
    assert "context" in assert_refused(path, send(templates, path, body))


def nested(depth: int) -> dict[str, Any]:
    """A schema of objects in objects."""
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def of_text(**keywords: Any) -> dict[str, Any]:
    """A schema of objects with one text."""
    return {"type": "object", "properties": {"a": {"type": "string", **keywords}}, "required": ["a"]}


GOOD = {
    "recursive": {"type": "object", "properties": {"a": {"$ref": "#"}}},
    "mutually recursive": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x"}},
        "$defs": {
            "x": {"type": "object", "properties": {"b": {"$ref": "#/$defs/y"}}},
            "y": {"type": "object", "properties": {"c": {"$ref": "#/$defs/x"}}},
        },
    },
    "ambiguous regex": of_text(pattern=r"^(a|aa)+$"),
    "ambiguous nested regex": of_text(pattern=r"^(((a|aa)+)+)+$"),
    "large regex": of_text(pattern=r"^(.{1,1000}){1,1000}$"),
    "nested": nested(15),
}
BAD = {
    "a megabyte": of_text(description="x" * (1 << 20)),
    "refers to itself alone": {"type": "object", "$ref": "#"},
    "refers in a circle": {
        "type": "object",
        "$ref": "#/$defs/x",
        "$defs": {"x": {"$ref": "#/$defs/y"}, "y": {"$ref": "#/$defs/x"}},
    },
    "refers to nothing": {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}},
    "refers elsewhere": {"type": "object", "properties": {"a": {"$ref": "https://example.com/schema.json"}}},
    "no regex": of_text(pattern="("),
    "nested too deep": nested(300),
    "half of a surrogate pair": of_text(description="\ud800"),
    "half of a pair as a name": {"type": "object", "properties": {"\ud800": {}}},
    "not a number": {"type": "object", "properties": {"a": {"enum": [float("nan")]}}},
}


def in_chat_form(schema: Any) -> tuple[str, dict[str, Any]]:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    return CHAT, {"messages": ASKED, "max_tokens": 8, "response_format": form}


def in_chat_tool(schema: Any) -> tuple[str, dict[str, Any]]:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    return CHAT, {"messages": ASKED, "max_tokens": 8, "tools": tools, "tool_choice": "required"}


def in_structured_outputs(schema: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": ASKED, "max_tokens": 8, "structured_outputs": {"json": schema}}


def in_response_form(schema: Any) -> tuple[str, dict[str, Any]]:
    form = {"type": "json_schema", "name": "a", "schema": schema}
    return RESPONSES, {"input": "a", "max_output_tokens": 8, "text": {"format": form}}


def in_response_tool(schema: Any) -> tuple[str, dict[str, Any]]:
    tools = [{"type": "function", "name": "f", "parameters": schema}]
    return RESPONSES, {"input": "a", "max_output_tokens": 8, "tools": tools, "tool_choice": "required"}


def in_message_form(schema: Any) -> tuple[str, dict[str, Any]]:
    form = {"type": "json_schema", "schema": schema}
    return MESSAGES, {"messages": ASKED, "max_tokens": 8, "output_config": {"format": form}}


def in_message_tool(schema: Any) -> tuple[str, dict[str, Any]]:
    tools = [{"name": "f", "input_schema": schema}]
    return MESSAGES, {"messages": ASKED, "max_tokens": 8, "tools": tools, "tool_choice": {"type": "any"}}


PLACES = [
    in_chat_form,
    in_chat_tool,
    in_structured_outputs,
    in_response_form,
    in_response_tool,
    in_message_form,
    in_message_tool,
]


def at_some_places(schemas: dict[str, Any]) -> list[Any]:
    """Each schema at one place, and each place with some; the others take long."""
    grid = [
        (name, place, (number - at) % len(PLACES))
        for number, name in enumerate(schemas)
        for at, place in enumerate(PLACES)
    ]
    return [
        pytest.param(place, schemas[name], id=f"{place.__name__}-{name}", marks=[pytest.mark.long] * bool(distance))
        for name, place, distance in grid
    ]


@pytest.mark.parametrize(("place", "schema"), at_some_places(GOOD))
def test_an_unusual_schema_is_followed(client: httpx.Client, place: Any, schema: Any) -> None:
    answer = send(client, *place(schema))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("place", "schema"), at_some_places(BAD))
def test_a_bad_schema_is_refused(client: httpx.Client, place: Any, schema: Any) -> None:
    path, body = place(schema)
    assert assert_refused(path, send(client, path, body))


@pytest.mark.parametrize("place", [in_response_form, in_message_tool])
def test_many_values_are_refused_or_followed(client: httpx.Client, place: Any) -> None:
    """A prompt has no room for those of a tool."""
    path, body = place(of_text(enum=[f"value {index}" for index in range(10_000)]))
    answer = send(client, path, body)
    if "tools" in body:
        assert "context" in assert_refused(path, answer)
    else:
        assert answer.status_code == 200, answer.text


def levels(depth: int) -> str:
    """The text of a schema whose objects stand in each other so deep."""
    return '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)


@pytest.mark.parametrize(
    "schema",
    [DEEP, levels(101), levels(952), '{"a": NaN', "3"],
    ids=["deep", "101 levels", "952 levels", "cut off", "no object"],
)
def test_a_bad_text_of_a_schema_is_refused_alone_and_beside_tools(client: httpx.Client, schema: str) -> None:
    some: list[Any] = in_chat_tool({"type": "object"})[1]["tools"]
    for tools in (some[:0], some):
        body = {"messages": ASKED, "max_tokens": 2, "structured_outputs": {"json": schema}, "tools": tools}
        assert "structured_outputs.json" in assert_refused(CHAT, send(client, CHAT, body))
