"""Calls of tools in chats, agents that send the answers back, and answers in a form."""

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletionMessage

from tests.errors import assert_error
from tests.grammars.schemas import random_schema
from tests.openai.conftest import MODEL
from tests.serving import serve
from tests.tool_schemas import ENDS, PLACE, SCHEMAS, ZONE

CHAT: Any = [{"role": "user", "content": "Which?"}]
NOW: Any = {"type": "function", "function": {"name": "now"}}


def tool(name: str, parameters: dict[str, Any], **more: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "of use", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
UNIQUE: Any = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
CALL: Any = {"model": MODEL, "messages": CHAT, "tools": TOOLS, "max_tokens": 400, "seed": 5, "logit_bias": ENDS}


def check_calls(message: ChatCompletionMessage) -> list[str]:
    """That every call is one that its tool takes; returns the tools."""
    names = []
    for call in message.tool_calls or ():
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
        names.append(call.function.name)
    assert len({call.id for call in message.tool_calls or ()}) == len(names)
    return names


@pytest.fixture(scope="session")
def openai_url(roomy_url: str) -> str:
    """The server whose model has room for tools."""
    return roomy_url


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_named_tool_and_only_allowed_ones_are_called(sdk: Any, name: str) -> None:
    chosen: Any = {"type": "function", "function": {"name": name}}
    [choice] = sdk.chat.completions.create(**CALL, tool_choice=chosen).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert check_calls(choice.message) == [name]
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [chosen]}}
    answer = sdk.chat.completions.create(**CALL, tool_choice=allowed)
    assert set(check_calls(answer.choices[0].message)) == {name}


def test_the_model_decides_unless_told_otherwise(sdk: Any) -> None:
    """A model of random weights calls nothing: its answer is what it would be of the same prompt."""
    asked: Any = {**CALL, "max_tokens": 8, "temperature": 0}
    answer, none = sdk.chat.completions.create(**asked), sdk.chat.completions.create(**asked, tool_choice="none")
    assert answer.choices[0].message.tool_calls is None
    assert none.choices[0].message.content.rstrip() == answer.choices[0].message.content.rstrip()
    assert none.usage.total_tokens == answer.usage.total_tokens


def test_an_answer_has_the_asked_form_or_is_calls(sdk: Any) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "zone", "schema": ZONE}}
    for seed in range(3):
        [choice] = sdk.chat.completions.create(**{**CALL, "seed": seed}, response_format=form).choices
        if not check_calls(choice.message):
            jsonschema.validate(json.loads(choice.message.content), ZONE)
        assert choice.finish_reason in ("stop", "tool_calls")


def test_a_form_beside_required_calls_is_checked_and_named(http: httpx.Client) -> None:
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": PLACE}}}
    answer = http.post("/v1/chat/completions", json={**CALL, **form, "tool_choice": "required"})
    assert answer.headers["X-Djinn-Ignored"] == "response_format"
    assert answer.json()["choices"][0]["message"]["tool_calls"]
    decided = http.post("/v1/chat/completions", json={**CALL, **form})
    assert "X-Djinn-Ignored" not in decided.headers
    wrong = http.post(
        "/v1/chat/completions", json={**CALL, "structured_outputs": {"regex": "a"}, "tool_choice": "required"}
    )
    assert_error(wrong, 400, "field_out_of_range", param="structured_outputs.regex")


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [*TOOLS, tool("a", {"type": "integer"})]}, "tools.2.function.parameters"),
        ({"tools": TOOLS, "structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
    ],
)
def test_what_cannot_be_done_is_refused_and_named(http: httpx.Client, changed: Any, param: str) -> None:
    response = http.post("/v1/chat/completions", json={"model": MODEL, "messages": CHAT, "max_tokens": 2, **changed})
    assert_error(response, 400, "field_out_of_range", param=param)


@pytest.mark.parametrize(
    ("path", "required", "one", "field"),
    [
        ("chat/completions", "required", {"parallel_tool_calls": False}, "2.function.parameters"),
        ("responses", "required", {"parallel_tool_calls": False}, "0.tools.0.parameters"),
        ("messages", {"type": "any"}, {"type": "auto", "disable_parallel_tool_use": True}, "0.input_schema"),
    ],
)
def test_what_no_grammar_holds_is_named_and_is_refused_where_calls_must_follow_it(
    http: httpx.Client, path: str, required: Any, one: Any, field: str
) -> None:
    odd, none, must = {"properties": {"a": {"type": "bar"}}}, {"properties": {"a": "bar"}}, {"tool_choice": required}
    one = {"tool_choice": one} if path == "messages" else one

    def ask(schema: Any, more: Any, strict: Any = False) -> httpx.Response:
        inner: Any = {"type": "function", "name": "f", "parameters": schema, "strict": strict}
        tools = {
            "chat/completions": [NOW, tool("free", odd if strict else {}), tool("f", schema, strict=strict)],
            "messages": [{"name": "f", "input_schema": schema, "strict": strict}],
            "responses": [{"type": "namespace", "name": "n", "tools": [inner]}],
        }[path]
        prompt = {"input": "Hi", "max_output_tokens": 2} if path == "responses" else {"messages": CHAT, "max_tokens": 2}
        return http.post(f"/v1/{path}", json={"model": MODEL, **prompt, "tools": tools, **more})

    loosened: Any = (UNIQUE, must, [".properties.a.uniqueItems"]), (none, {}, [".properties.a"])
    for schema, more, named in (*loosened, (odd, one, [""]), (odd, {}, [])):
        names = ask(schema, more, schema is none).raise_for_status().headers.get("X-Djinn-Ignored", "").split(", ")
        assert [name for name in names if field in name] == [f"tools.{field}{each}" for each in named]
        assert "tools.0.function.parameters" not in names, "calls of it follow its schema"
    for refused in (ask(odd, must), ask(odd, {}, strict=True), ask(UNIQUE, {}, strict=True)):
        message = refused.json()["error"]["message"]
        assert (refused.status_code, message.partition(" '")[0]) == (400, f"tools.{field}: the parameters of")
        assert "free" not in message


def test_every_choice_has_calls_of_its_own_with_logprobs_of_all_tokens(sdk: Any) -> None:
    answer = sdk.chat.completions.create(**CALL, tool_choice="required", n=2, logprobs=True)
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls]
    assert all(check_calls(choice.message) for choice in answer.choices)
    assert len(set(ids)) == len(ids)
    assert sum(len(choice.logprobs.content) for choice in answer.choices) == answer.usage.completion_tokens


def test_a_stream_adds_up_to_the_whole_answer(sdk: Any) -> None:
    asked: Any = {**CALL, "tool_choice": "required", "temperature": 0}
    whole = sdk.chat.completions.create(**asked).choices[0].message.tool_calls
    with sdk.chat.completions.stream(**asked) as stream:
        events = list(stream)
        [choice] = stream.get_final_completion().choices
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
        (call.function.name, call.function.arguments) for call in whole
    ]
    assert choice.finish_reason == "tool_calls"
    deltas = [event.arguments_delta for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(deltas) == "".join(call.function.arguments for call in whole)


def test_a_call_that_ran_out_of_tokens_says_so_and_may_be_sent_back(sdk: Any, http: httpx.Client) -> None:
    """Frameworks ask again after it, with the call as it is."""
    cut = {**CALL, "max_tokens": 45, "tool_choice": NOW}
    raw = sdk.chat.completions.with_raw_response.create(**cut, extra_headers={"X-Session-ID": "cut-short"})
    [choice] = raw.parse().choices
    assert choice.finish_reason == "length"
    with sdk.chat.completions.stream(**cut) as stream, pytest.raises(openai.LengthFinishReasonError):
        stream.get_final_completion()
    [call] = choice.message.tool_calls
    with pytest.raises(ValueError, match=r"line 1 column \d+"):
        json.loads(call.function.arguments)
    assert http.get(f"/v1/sessions/{raw.headers['x-session-id']}").json()["phase"] == "compute"
    again: Any = [*CHAT, choice.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "Again."}]
    answer = sdk.chat.completions.create(**{**CALL, "messages": again}, tool_choice=NOW)
    assert check_calls(answer.choices[0].message) == ["now"]


def with_answers(chat: list[Any], message: Any) -> list[Any]:
    """The chat goes on with what the tools answered."""
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "42"} for call in message.tool_calls]
    return [*chat, message.model_dump(), *answers]


def test_an_agent_that_signals_nothing_waits_off_the_device(sdk: Any, http: httpx.Client) -> None:
    bound: Any = {"extra_headers": {"X-Session-ID": "weather-agent"}}
    first = sdk.chat.completions.with_raw_response.create(**CALL, tool_choice="required", **bound)
    session, answer = f"/v1/sessions/{first.headers['x-session-id']}", first.parse()
    assert http.get(session).json()["phase"] == "io_wait"
    chat = with_answers(CHAT, answer.choices[0].message)
    second = sdk.chat.completions.create(**{**CALL, "messages": chat, "max_tokens": 4}, tool_choice="none", **bound)
    assert http.get(session).json()["phase"] == "compute"
    assert second.usage.prompt_tokens_details.cached_tokens > 0.8 * answer.usage.prompt_tokens


def test_a_call_finds_its_session_by_the_history_that_it_continues(roomy_model: Path) -> None:
    with (
        serve(model=str(roomy_model), max_model_len=8192, bind_by_prefix=True, park_on_tool_calls=False) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as sdk,
        httpx.Client(base_url=url) as http,
    ):
        chats: list[Any] = [[{"role": "user", "content": f"I am agent {name}."}] for name in "AB"]
        asked: Any = {"model": MODEL, "tools": TOOLS, "tool_choice": NOW, "max_tokens": 300}
        ids: list[set[str]] = [set(), set()]
        for _ in range(3):
            for number in range(2):
                raw = sdk.chat.completions.with_raw_response.create(**asked, messages=chats[number])
                ids[number].add(raw.headers["x-session-id"])
                chats[number] = with_answers(chats[number], raw.parse().choices[0].message)
        (one,), (other,) = ids
        assert one != other
        phases = [http.get(f"/v1/sessions/{name}").json()["phase"] for name in (one, other)]
        assert phases == ["compute", "compute"]  # parking is off here


RANDOM_SCHEMAS = [random_schema(seed) for seed in range(100, 102)]


def ask(sdk: Any, **fields: Any) -> list[str]:
    """Texts of the choices, all of which have stopped by themselves."""
    asked = {"model": MODEL, "messages": CHAT, "seed": 4, "max_tokens": 700, **fields}
    answer = sdk.chat.completions.create(**asked)
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * len(answer.choices)
    return [choice.message.content or "" for choice in answer.choices]


@pytest.mark.parametrize("schema", RANDOM_SCHEMAS, ids=str)
def test_every_choice_and_stream_matches_the_schema(sdk: Any, schema: dict[str, Any]) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    asked: Any = {"response_format": form, "model": MODEL, "messages": CHAT, "seed": 4, "max_tokens": 700}
    stream = sdk.chat.completions.create(**asked, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert [streamed] == ask(sdk, response_format=form)
    for text in ask(sdk, response_format=form, n=3):
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def test_a_json_object_is_one_and_choices_differ(sdk: Any) -> None:
    asked: Any = {"model": MODEL, "messages": CHAT, "max_tokens": 200, "response_format": {"type": "json_object"}}
    assert sdk.chat.completions.create(**asked).choices[0].message.content.startswith("{")
    assert len(set(ask(sdk, n=3, extra_body={"structured_outputs": {"regex": "[a-z]{12}"}}))) == 3
    only: Any = {"type": "json_object", "schema": {"const": {"a": 1}}}
    assert json.loads(ask(sdk, response_format=only)[0]) == {"a": 1}
    response = sdk.responses.create(model=MODEL, input="x", text={"format": only}, max_output_tokens=50)
    assert json.loads(response.output_text) == {"a": 1}


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": "[a-c]{3,5}x"}, "[a-c]{3,5}x"),
        ({"choice": ["yes", "no", 'it\'s "so"']}, 'yes|no|it\'s "so"'),
        ({"grammar": 'start: "a" ("b" | "c") "d"'}, "a[bc]d"),
        ({"json": {"type": "integer", "minimum": 7, "maximum": 9}}, "[789]"),
        ({"json": '{"enum": [1, "é"]}', "regex": None}, '1|"é"'),
    ],
)
def test_the_forms_of_vllm(sdk: Any, form: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, ask(sdk, extra_body={"structured_outputs": form, "ignore_eos": True})[0])
    completion = sdk.completions.create(
        model=MODEL, prompt="x", max_tokens=100, extra_body={"structured_outputs": form, "ignore_eos": True}
    )
    assert re.fullmatch(pattern, completion.choices[0].text)
    assert completion.choices[0].finish_reason == "stop"


def test_a_grammar_that_takes_long_to_compile_stalls_no_other_call(sdk: Any) -> None:
    ask(sdk, extra_body={"structured_outputs": {"regex": "warm"}})
    schema = {"type": "object", "properties": {f"p{i}": {} for i in range(9000)}}
    refused: list[openai.APIStatusError] = []

    def send() -> None:
        with pytest.raises(openai.APIStatusError) as caught:
            ask(sdk, extra_body={"structured_outputs": {"json": schema}})
        refused.append(caught.value)

    slow = threading.Thread(target=send)
    slow.start()
    longest = 0.0
    while slow.is_alive():
        began = time.monotonic()
        sdk.completions.create(model=MODEL, prompt="x", max_tokens=4)
        longest = max(longest, time.monotonic() - began)
    assert "structured_outputs.json" in refused[0].message
    assert longest < 5
