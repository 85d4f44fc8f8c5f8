"""Schemas that are made to break the server, in each field that takes one: a refusal in the API's own body, or an
answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.openai.reference import save_tiny_model
from tests.routers.hostile import ASKED, CHAT, DEEP, MESSAGES, RESPONSES, TIMEOUT_S, assert_refused, send
from tests.serving import serve


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(folder, max_model_len=4096)
    with serve(model=str(folder), max_model_len=4096) as url, httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        yield client


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
    for tools in ([], in_chat_tool({"type": "object"})[1]["tools"]):
        body = {"messages": ASKED, "max_tokens": 2, "structured_outputs": {"json": schema}, "tools": tools}
        assert "structured_outputs.json" in assert_refused(CHAT, send(client, CHAT, body))
