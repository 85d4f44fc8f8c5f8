"""Tools in a chat, as the official SDK sends and reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionMessage

from tests.errors import assert_error
from tests.openai.conftest import MODEL
from tests.openai.reference import save_tiny_model
from tests.serving import serve

PLACE = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["place", "days"],
    "additionalProperties": False,
}
ZONE = {
    "type": "object",
    "properties": {"zone": {"enum": ["UTC", "CET"]}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {"get_weather": PLACE, "now": ZONE}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "of use", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
CHAT: Any = [{"role": "user", "content": "Which?"}]


def tool(name: str, parameters: dict[str, Any]) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


NOW: Any = {"type": "function", "function": {"name": "now"}}
CALL: Any = {"model": MODEL, "messages": CHAT, "tools": TOOLS, "max_tokens": 400, "seed": 5}


@pytest.fixture(scope="module")
def roomy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with room for tools, each byte of which is a token."""
    folder: Path = tmp_path_factory.mktemp("models") / MODEL
    save_tiny_model(folder, max_model_len=8192)
    return folder


@pytest.fixture(scope="module")
def url(roomy_model: Path) -> Iterator[str]:
    with serve(model=str(roomy_model), max_model_len=8192) as url:
        yield url


@pytest.fixture
def sdk(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=30) as client:
        yield client


def check_calls(message: ChatCompletionMessage) -> list[str]:
    """That every call is one that its tool takes; returns the tools."""
    names = []
    for call in message.tool_calls or ():
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
        names.append(call.function.name)
    assert len({call.id for call in message.tool_calls or ()}) == len(names)
    return names


@pytest.mark.parametrize("seed", range(4))
def test_a_required_call_is_one_that_the_tool_takes(sdk: openai.OpenAI, seed: int) -> None:
    answer = sdk.chat.completions.create(**{**CALL, "seed": seed}, tool_choice="required", parallel_tool_calls=False)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert len(check_calls(choice.message)) == 1


def test_a_call_has_no_argument_that_its_schema_does_not_name(sdk: openai.OpenAI) -> None:
    """A model of random weights would add keys until its tokens run out."""
    open_schema = {key: value for key, value in ZONE.items() if key != "additionalProperties"}
    tools: Any = [{"type": "function", "function": {"name": "now", "parameters": open_schema}}]
    for seed in range(4):
        answer = sdk.chat.completions.create(**{**CALL, "tools": tools, "seed": seed}, tool_choice=NOW)
        assert check_calls(answer.choices[0].message) == ["now"]


@pytest.mark.parametrize("about", [{}, {"parameters": {"type": "object", "properties": {}}}])
def test_a_function_without_parameters_is_called_with_an_empty_object(sdk: openai.OpenAI, about: Any) -> None:
    tools: Any = [{"type": "function", "function": {"name": "now", **about}}]
    (choice,) = sdk.chat.completions.create(**{**CALL, "tools": tools}, tool_choice=NOW).choices
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {}


def test_a_named_tool_is_the_one_that_is_called(sdk: openai.OpenAI) -> None:
    for name in SCHEMAS:
        chosen: Any = {"type": "function", "function": {"name": name}}
        answer = sdk.chat.completions.create(**CALL, tool_choice=chosen)
        assert check_calls(answer.choices[0].message) == [name]


def test_only_allowed_tools_are_called(sdk: openai.OpenAI) -> None:
    allowed: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    chosen: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = sdk.chat.completions.create(**CALL, tool_choice=chosen)
    assert set(check_calls(answer.choices[0].message)) == {"now"}


def test_a_stream_adds_up_to_the_whole_answer(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(**CALL, tool_choice="required", temperature=0).choices[0].message
    with sdk.chat.completions.stream(**CALL, tool_choice="required", temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert [call.function for call in whole.tool_calls or () if call.type == "function"]
    streamed = final.choices[0].message.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in streamed] == [
        (call.function.name, call.function.arguments) for call in whole.tool_calls or () if call.type == "function"
    ]
    assert final.choices[0].finish_reason == "tool_calls"
    assert sum(event.type == "tool_calls.function.arguments.delta" for event in events) > 2


def test_the_first_delta_of_a_call_names_it_and_the_others_bring_arguments(http: httpx.Client) -> None:
    body = {**CALL, "tool_choice": "required", "parallel_tool_calls": False, "stream": True, "temperature": 0}
    lines = [line[6:] for line in http.post("/v1/chat/completions", json=body).text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert chunks[0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["delta"] == {}
    assert chunks[-1]["finish_reason"] == "tool_calls"
    first, *others = [chunk["delta"]["tool_calls"][0] for chunk in chunks[1:-1]]
    assert first.keys() == {"index", "id", "type", "function"}
    assert first["function"]["arguments"] == ""
    assert all(each.keys() == {"index", "function"} for each in others)
    assert all(each["function"].keys() == {"arguments"} for each in others)


def test_the_model_decides_unless_told_otherwise(sdk: openai.OpenAI) -> None:
    """A model of random weights calls nothing: its answer is what it would be of the same prompt."""
    answer = sdk.chat.completions.create(**{**CALL, "max_tokens": 8}, temperature=0)
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason in ("stop", "length")
    none = sdk.chat.completions.create(**{**CALL, "max_tokens": 8}, temperature=0, tool_choice="none")
    assert (none.choices[0].message.content or "").rstrip() == (answer.choices[0].message.content or "").rstrip()
    assert none.usage is not None
    assert answer.usage is not None
    assert none.usage.total_tokens == answer.usage.total_tokens


def test_an_answer_has_the_asked_form_or_is_calls(sdk: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "zone", "schema": ZONE}}
    said = set()
    for seed in range(6):
        answer = sdk.chat.completions.create(**{**CALL, "seed": seed}, response_format=form)
        message = answer.choices[0].message
        if not check_calls(message):
            jsonschema.validate(json.loads(message.content or ""), ZONE)
        said.add(answer.choices[0].finish_reason)
    assert said <= {"stop", "tool_calls"}


def test_every_choice_has_calls_of_its_own(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(**CALL, tool_choice="required", n=3)
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or ()]
    assert all(check_calls(choice.message) for choice in answer.choices)
    assert len(set(ids)) == len(ids)


def test_logprobs_of_a_call_are_those_of_all_its_tokens(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(**CALL, tool_choice="required", logprobs=True)
    assert answer.usage is not None
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content or ()) == answer.usage.completion_tokens


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [*TOOLS, tool("a", {"type": "integer"})]}, "tools.2.function.parameters"),
        ({"tools": [tool("a", {"type": ["object", "null"]})]}, "tools.0.function.parameters"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
    ],
)
def test_what_cannot_be_done_is_refused_and_named(http: httpx.Client, changed: Any, param: str) -> None:
    response = http.post("/v1/chat/completions", json={"model": MODEL, "messages": CHAT, "max_tokens": 2, **changed})
    assert_error(response, 400, "field_out_of_range", param=param)


def test_a_call_that_ran_out_of_tokens_says_so_and_may_be_sent_back(sdk: openai.OpenAI, http: httpx.Client) -> None:
    """Frameworks ask again after it, with the call as it is."""
    bound: Any = {"extra_headers": {"X-Session-ID": "cut-short"}}
    cut = {**CALL, "max_tokens": 45, "tool_choice": NOW}
    raw = sdk.chat.completions.with_raw_response.create(**cut, **bound)
    (choice,) = raw.parse().choices
    assert choice.finish_reason == "length"
    with sdk.chat.completions.stream(**cut) as stream, pytest.raises(openai.LengthFinishReasonError):
        stream.get_final_completion()
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    with pytest.raises(ValueError, match=r"line 1 column \d+"):
        json.loads(call.function.arguments)
    assert http.get(f"/v1/sessions/{raw.headers['x-session-id']}").json()["phase"] == "compute"
    again: Any = [*CHAT, choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "Again."}]
    answer = sdk.chat.completions.create(**{**CALL, "messages": again}, tool_choice=NOW)
    assert check_calls(answer.choices[0].message) == ["now"]


def test_an_agent_that_signals_nothing_waits_off_the_device(sdk: openai.OpenAI, http: httpx.Client) -> None:
    bound: Any = {"extra_headers": {"X-Session-ID": "weather-agent"}}
    first = sdk.chat.completions.with_raw_response.create(**CALL, tool_choice="required", **bound)
    session = f"/v1/sessions/{first.headers['x-session-id']}"
    assert http.get(session).json()["phase"] == "io_wait"
    message = first.parse().choices[0].message
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "42"} for call in message.tool_calls or ()]
    chat: Any = [*CHAT, message.model_dump(), *answers]
    second = sdk.chat.completions.create(**{**CALL, "messages": chat, "max_tokens": 4}, tool_choice="none", **bound)
    assert http.get(session).json()["phase"] == "compute"
    usage = second.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens > 0.8 * (first.parse().usage or usage).prompt_tokens


@pytest.fixture(scope="module")
def binding_url(roomy_model: Path) -> Iterator[str]:
    with serve(model=str(roomy_model), max_model_len=8192, bind_by_prefix=True, park_on_tool_calls=False) as url:
        yield url


def test_a_call_finds_its_session_by_the_history_that_it_continues(binding_url: str) -> None:
    with (
        openai.OpenAI(base_url=f"{binding_url}/v1", api_key="none", max_retries=0) as sdk,
        httpx.Client(base_url=binding_url) as http,
    ):
        chats: list[Any] = [[{"role": "user", "content": f"I am agent {name}."}] for name in "AB"]
        ids: list[set[str]] = [set(), set()]
        for _ in range(3):
            for chat, seen in zip(chats, ids, strict=True):
                raw = sdk.chat.completions.with_raw_response.create(
                    model=MODEL, messages=chat, tools=TOOLS, tool_choice=NOW, max_tokens=300
                )
                seen.add(raw.headers["x-session-id"])
                message = raw.parse().choices[0].message
                answers = [
                    {"role": "tool", "tool_call_id": each.id, "content": "1"} for each in message.tool_calls or ()
                ]
                chat += [message.model_dump(), *answers]
        assert [len(seen) for seen in ids] == [1, 1]
        assert ids[0] != ids[1]
        phases = [http.get(f"/v1/sessions/{name}").json()["phase"] for seen in ids for name in seen]
        assert phases == ["compute", "compute"]  # parking is off here


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "bad"}}])
def test_a_refused_schema_is_named_by_its_tool_and_shows_no_other(http: httpx.Client, choice: Any) -> None:
    tools = [*TOOLS, tool("bad", {"not": {"type": "object"}})]
    response = http.post("/v1/chat/completions", json={**CALL, "tools": tools, "tool_choice": choice})
    message = assert_error(response, 400, "field_out_of_range", param="tools")
    assert message.startswith("tools: the parameters of 'bad': Unimplemented keys")
    assert "get_weather" not in message


def test_a_form_beside_required_calls_is_checked_and_named(http: httpx.Client) -> None:
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": PLACE}}}
    answer = http.post("/v1/chat/completions", json={**CALL, **form, "tool_choice": "required"})
    assert answer.headers["X-Djinn-Ignored"] == "response_format"
    assert answer.json()["choices"][0]["message"]["tool_calls"]
    decided = http.post("/v1/chat/completions", json={**CALL, **form})
    assert "X-Djinn-Ignored" not in decided.headers
    wrong = {"structured_outputs": {"regex": "a"}, "tool_choice": "required"}
    assert_error(
        http.post("/v1/chat/completions", json={**CALL, **wrong}),
        400,
        "field_out_of_range",
        param="structured_outputs.regex",
    )


def test_parallel_calls_are_named_as_ignored_without_tools(http: httpx.Client) -> None:
    call = {"model": MODEL, "messages": CHAT, "max_tokens": 4}
    for parallel, header in ((False, "parallel_tool_calls"), (True, None)):
        answer = http.post("/v1/chat/completions", json={**call, "parallel_tool_calls": parallel})
        assert answer.headers.get("X-Djinn-Ignored") == header
