"""Requests that are made to break the server: a refusal in the API's own body, or an answer."""

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


ARGUMENTS = {
    "nothing": "",
    "cut off": '{"a": [1, {"b": "c',
    "a list": "[1]",
    "not a number": '{"a": NaN}',
    "a long number": '{"a": ' + "1" * 5000 + "}",
    "twice the same name": '{"a": 1, "a": 2}',
    "control characters": '{"a": "\x00\x1f"}',
    **{f"{depth} levels": '{"a":' * depth + "1" + "}" * depth for depth in (80, 150, 950)},
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


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_malformed_arguments_may_be_sent_back(templates: httpx.Client, arguments: str) -> None:
    """A model wrote them: a client that cannot send them back is at the end of its conversation."""
    for sent in (chat_with, response_with):
        answer = send(templates, *sent(arguments))
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("arguments", "says"), [("\ud800", ""), (DEEP, "context")], ids=["no text", "too long"])
def test_arguments_that_no_context_can_hold_are_refused(templates: httpx.Client, arguments: str, says: str) -> None:
    for sent in (chat_with, response_with):
        path, body = sent(arguments)
        assert says in assert_refused(path, send(templates, path, body))


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
    "ambiguous nested regex": of_text(pattern=r"^(((a|aa)+)+)+$"),
    "large regex": of_text(pattern=r"^(.{1,1000}){1,1000}$"),
    "nested": nested(15),
}
BAD = {
    "a megabyte": of_text(description="x" * (1 << 20)),
    "refers to itself alone": {"type": "object", "$ref": "#"},
    "holds itself": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "refers elsewhere": {"type": "object", "properties": {"a": {"$ref": "https://example.com/schema.json"}}},
    "no regex": of_text(pattern="("),
    "nested too deep": nested(300),
    "half of a surrogate pair": of_text(description="\ud800"),
    "not a number": {"type": "object", "properties": {"a": {"enum": [float("nan")]}}},
}


def bodies(schema: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """A call with the schema in each place that takes one."""
    chat, response = {"messages": ASKED, "max_tokens": 8}, {"input": "a", "max_output_tokens": 8}
    form, function = {"name": "a", "schema": schema}, {"name": "f", "parameters": schema}
    chat_form = {"type": "json_schema", "json_schema": form}
    message_form = {"type": "json_schema", "schema": schema}
    message_tool = {"tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "any"}}
    required = {"tool_choice": "required"}
    return {
        "chat form": (CHAT, {**chat, "response_format": chat_form}),
        "chat tool": (CHAT, {**chat, **required, "tools": [{"type": "function", "function": function}]}),
        "structured outputs": (CHAT, {**chat, "structured_outputs": {"json": schema}}),
        "response form": (RESPONSES, {**response, "text": {"format": {"type": "json_schema", **form}}}),
        "response tool": (RESPONSES, {**response, **required, "tools": [{"type": "function", **function}]}),
        "message form": (MESSAGES, {**chat, "output_config": {"format": message_form}}),
        "message tool": (MESSAGES, {**chat, **message_tool}),
    }


PLACES = list(bodies({}))


def at_some_places(schemas: dict[str, Any]) -> list[Any]:
    """Each schema at one place, and each place with some; the others take long."""
    return [
        pytest.param(
            place, schemas[name], id=f"{place}-{name}", marks=[pytest.mark.long] * bool((number - at) % len(PLACES))
        )
        for number, name in enumerate(schemas)
        for at, place in enumerate(PLACES)
    ]


@pytest.mark.parametrize(("place", "schema"), at_some_places(GOOD))
def test_an_unusual_schema_is_followed(client: httpx.Client, place: str, schema: Any) -> None:
    answer = send(client, *bodies(schema)[place])
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("place", "schema"), at_some_places(BAD))
def test_a_bad_schema_is_refused(client: httpx.Client, place: str, schema: Any) -> None:
    path, body = bodies(schema)[place]
    assert assert_refused(path, send(client, path, body))


@pytest.mark.parametrize("place", ["response form", "message tool"])
def test_many_values_are_refused_or_followed(client: httpx.Client, place: str) -> None:
    """A prompt has no room for those of a tool."""
    path, body = bodies(of_text(enum=[f"value {index}" for index in range(10_000)]))[place]
    answer = send(client, path, body)
    if "tools" in body:
        assert "too long" in assert_refused(path, answer)
    else:
        assert answer.status_code == 200, answer.text


def levels(depth: int) -> str:
    """The text of a schema whose objects stand in each other so deep."""
    return '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)


@pytest.mark.parametrize(
    "schema", [DEEP, levels(101), '{"a": NaN', "3"], ids=["deep", "101 levels", "cut off", "no object"]
)
def test_a_bad_text_of_a_schema_is_refused_alone_and_beside_tools(client: httpx.Client, schema: str) -> None:
    some: list[Any] = bodies({"type": "object"})["chat tool"][1]["tools"]
    for tools in (some[:0], some):
        body = {"messages": ASKED, "max_tokens": 2, "structured_outputs": {"json": schema}, "tools": tools}
        assert "structured_outputs.json" in assert_refused(CHAT, send(client, CHAT, body))
