"""Conversations, tools and errors, as the official SDK of Anthropic sends and reads them."""

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import anthropic
import httpx
import jsonschema
import pytest

from app.anthropic.answers import MessageWriter, collect
from app.anthropic.messages import CountTokensBody, chat_of
from app.domain.values import FinishReason, Ticket, TurnUsage
from app.messages import TurnFinished
from app.text.generation import TextChunk
from app.tools.formats import HERMES
from app.tools.reader import Answer, FamilyReader
from app.tools.replay import Chat
from app.tools.thinking import Seal
from tests.anthropic.conftest import ASK, MODEL, prompt_of, text_of
from tests.conftest import ServeWith
from tests.errors import assert_messages_error
from tests.tool_schemas import ENDS, SCHEMAS
from tests.tools.calls import TOOLS, write

GREEDY: Any = {"extra_body": {"temperature": 0, "ignore_eos": True}}


def test_the_answer_is_what_a_chat_with_these_messages_has(sdk: anthropic.Anthropic, http: httpx.Client) -> None:
    system, said = "Be kind.", [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
    messages: Any = [*said, {"role": "user", "content": "And now?"}]
    answer = sdk.messages.create(**{**ASK, "messages": messages}, system=system, **GREEDY)
    body = {**ASK, "messages": [{"role": "system", "content": system}, *messages], **GREEDY["extra_body"]}
    chat = http.post("/v1/chat/completions", json=body).json()
    assert text_of(answer) == chat["choices"][0]["message"]["content"]
    assert (answer.role, answer.model, answer.stop_reason) == ("assistant", MODEL, "max_tokens")
    assert answer.id.startswith("msg_")
    assert prompt_of(answer.usage) == chat["usage"]["prompt_tokens"]
    assert answer.usage.output_tokens == ASK["max_tokens"]


def test_events_come_in_the_documented_order(http: httpx.Client) -> None:
    response = http.post("/v1/messages", json={**ASK, "stream": True, "temperature": 0, "ignore_eos": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    names, events = [], []
    for part in response.text.strip().split("\n\n"):
        name, data = part.split("\n")
        names.append(name.removeprefix("event: "))
        events.append(json.loads(data.removeprefix("data: ")))
    assert names == [event["type"] for event in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert set(names[2:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    started = events[0]["message"]
    assert (started["content"], started["stop_reason"], started["usage"]["output_tokens"]) == ([], None, 0)
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[0]["message"]["usage"] | {"output_tokens": ASK["max_tokens"]} == events[-2]["usage"]


def test_the_stop_sequence_that_matched_is_named(sdk: anthropic.Anthropic) -> None:
    full = text_of(sdk.messages.create(**{**ASK, "max_tokens": 40}, **GREEDY))
    stop = full[len(full) // 2 :][:3]
    asked: Any = {**ASK, "max_tokens": 40, "stop_sequences": ["never said", stop]}
    whole = sdk.messages.create(**asked, **GREEDY)
    with sdk.messages.stream(**asked, **GREEDY) as stream:
        streamed = stream.get_final_message()
    for answer in (whole, streamed):
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
        assert text_of(answer) == full[: full.index(stop)]


def test_a_model_that_has_said_all_ends_its_turn(sdk: anthropic.Anthropic) -> None:
    end = {"stop_token_ids": list(range(64)), "logit_bias": {str(token): 100 for token in range(64)}}
    for messages in (sdk.messages, sdk.beta.messages):
        answer = messages.create(**ASK, extra_body=end)
        assert (answer.stop_reason, answer.stop_sequence, answer.usage.output_tokens) == ("end_turn", None, 1)


def test_no_tokens_only_compute_the_prompt(sdk: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "warm this up, please, for the call that follows"}]
    warm = sdk.messages.create(model=MODEL, max_tokens=0, messages=messages)
    assert (warm.content, warm.usage.output_tokens, warm.usage.cache_read_input_tokens) == ([], 0, 0)
    usage = sdk.messages.create(model=MODEL, max_tokens=1, messages=messages).usage
    assert prompt_of(usage) - 16 <= (usage.cache_read_input_tokens or 0) <= prompt_of(usage)
    assert prompt_of(usage) == sdk.messages.count_tokens(model=MODEL, messages=messages).input_tokens


def test_an_answer_continues_a_last_message_of_the_assistant(sdk: anthropic.Anthropic, http: httpx.Client) -> None:
    messages: Any = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "The best answer is ("}]
    opened = {"messages": messages, "add_generation_prompt": False, "continue_final_message": True}
    tokens = http.post("/tokenize", json=opened).json()["tokens"]
    body = {"model": MODEL, "prompt": tokens, "max_tokens": 12, **GREEDY["extra_body"]}
    goes_on = http.post("/v1/completions", json=body).json()
    answer = sdk.messages.create(**{**ASK, "messages": messages}, **GREEDY)
    assert text_of(answer) == goes_on["choices"][0]["text"]
    assert prompt_of(answer.usage) == len(tokens)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": "Be kind."},
        {"system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]},
        {"tools": [{"name": "now", "description": "the time", "input_schema": {"type": "object"}}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"thinking": {"type": "disabled"}},
        {"thinking": {"type": "adaptive"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    ],
)
def test_counted_tokens_are_those_of_the_call(sdk: anthropic.Anthropic, fields: Any) -> None:
    asked = {"model": MODEL, "messages": ASK["messages"], **fields}
    counted = sdk.messages.count_tokens(**asked).input_tokens
    assert counted == prompt_of(sdk.messages.create(**asked, max_tokens=1).usage)


def test_a_bound_call_reads_what_its_session_has(sdk: anthropic.Anthropic, http: httpx.Client) -> None:
    bound: Any = {"extra_headers": {"X-Session-ID": "reader-of-kv"}}
    first = sdk.messages.with_raw_response.create(**ASK, metadata={"user_id": "ann"}, **bound)
    answer = first.parse()
    messages: Any = [*ASK["messages"], {"role": "assistant", "content": "x"}, {"role": "user", "content": "more"}]
    second = sdk.messages.with_raw_response.create(**{**ASK, "messages": messages}, **bound)
    assert first.headers["x-session-id"] == second.headers["x-session-id"]
    usage = second.parse().usage
    assert (usage.cache_read_input_tokens or 0) >= prompt_of(answer.usage)
    session = http.get(f"/v1/sessions/{first.headers['x-session-id']}").json()
    assert session["metadata"] == {"name": "reader-of-kv", "user": "ann"}
    read = [each.cache_read_input_tokens or 0 for each in (answer.usage, usage)]
    assert session["usage"]["cached_tokens"] == sum(read)


def test_an_answer_has_the_asked_form(sdk: anthropic.Anthropic) -> None:
    schema: Any = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    answer = sdk.messages.create(**{**ASK, "max_tokens": 200}, output_config=form)
    assert json.loads(text_of(answer))["a"] in (1, 2)
    assert answer.stop_reason == "end_turn"


def test_fields_without_effect_are_named(http: httpx.Client) -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    body = {
        **ASK,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello", **cached}]}],
        "tools": [{"name": "now", "input_schema": {"type": "object"}, **cached}],
        "mcp_servers": [{"type": "url", "name": "tools", "url": "http://x"}],
        "unheard_of": 1,
        **cached,
    }
    body["tools"].append({"type": "mcp_toolset", "mcp_server_name": "tools"})
    response = http.post("/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"})
    assert response.status_code == 200
    named = {"cache_control", "messages.0.content.0.cache_control", "tools.0.cache_control"}
    named |= {"mcp_servers", "tools.1", "unheard_of"}
    assert set(response.headers["x-djinn-ignored"].split(", ")) == named


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_what_no_model_here_can_use_is_left_out_and_named(http: httpx.Client, path: str) -> None:
    thought = [{"type": "thinking", "thinking": "?", "signature": ""}, {"type": "redacted_thinking", "data": "AA"}]
    line = "x-anthropic-billing-header: cch=00001;"
    billing = text(line)

    def ask(*more: Any, **fields: Any) -> httpx.Response:
        said = [*ASK["messages"], {"role": "assistant", "content": [*more, text("Yes")]}, *ASK["messages"]]
        body = {"model": MODEL, "messages": said, "system": [text("Be kind.")], **fields}
        return http.post(path, json={**body, "max_tokens": 0} if path == "/v1/messages" else body)

    full = ask(*thought, thinking={"type": "adaptive"}, system=[billing, text("Be kind.")])
    assert full.status_code == 200, full.text
    assert full.headers["x-djinn-ignored"].split(", ") == [
        "thinking",
        "messages.1.content.0.thinking",
        "messages.1.content.1.data",
        "system.0.text",
    ]
    said = [*ASK["messages"], {"role": "assistant", "content": "Yes"}, *ASK["messages"]]
    for content, named in ((f"{line}\nBe kind.", ""), ([billing, text("Be kind.")], ".0.text"), ("Be kind.", None)):
        within = ask(system=[], messages=[{"role": "system", "content": content}, *said])
        for place, answer in (("system", ask(system=content)), ("messages.0.content", within)):
            assert answer.headers.get("x-djinn-ignored") == (None if named is None else place + named)
            usages = [each.json().get("usage", each.json()) for each in (full, answer)]
            counts = [usage["input_tokens"] + usage.get("cache_read_input_tokens", 0) for usage in usages]
            assert counts[0] == counts[1], (place, content)
    assert "x-djinn-ignored" not in ask(thinking={"type": "disabled"}).headers
    assert ask(messages=[{"role": "system", "content": []}]).status_code == 200


def test_images_and_documents_are_left_out_by_a_text_and_tools_that_were_found_are_named(http: httpx.Client) -> None:
    shown = [{"type": kind, "source": {"type": "url", "url": "http://x"}} for kind in ("image", "document")]
    found = {"type": "tool_result", "tool_use_id": "toolu_a", "content": [*shown, FOUND]}
    body = {**ASK, "messages": [*ASK["messages"], CALLS_NOW, {"role": "user", "content": [found, shown[0]]}]}
    told = http.post("/v1/messages", json=body).raise_for_status().headers["x-djinn-ignored"]
    assert told.split(", ") == [f"messages.2.content.{path}" for path in ("1", "0.content.0", "0.content.1")]
    _, _, tool, user = chat(*body["messages"])
    assert [each.split()[1] for each in tool["content"].split("\n")[:2]] == ["image", "document"]
    assert (tool["content"].split("\n")[2], "An image was left out" in user["content"]) == ("look_up", True)


def test_a_tool_that_a_search_finds_leaves_the_prompt_before_it_as_it_was(http: httpx.Client) -> None:
    def ask(tools: list[Any], *more: Any) -> Any:
        answer = http.post("/v1/messages", json={**ASK, "tools": tools, "messages": [*ASK["messages"], *more]})
        usage = anthropic.types.Usage.model_validate(answer.raise_for_status().json()["usage"])
        return usage, answer.headers.get("x-djinn-ignored")

    late = {**TOOL, "name": "look_up", "description": "Finds a word.", "defer_loading": True}
    found = {"type": "tool_result", "tool_use_id": "toolu_a", "content": [FOUND]}
    more = [CALLS_NOW, {"role": "user", "content": [found]}]
    before, _ = ask([TOOL])
    after, told = ask([late, TOOL], *more)
    named, _ = ask([TOOL], *more)
    assert after.cache_read_input_tokens >= prompt_of(before) - 16
    assert (prompt_of(after) > prompt_of(named) + len("Finds a word."), told) == (True, None)
    assert ask([late, TOOL])[1] == "tools.0.defer_loading"


# From the messages of a call to a chat as templates read it.


def chat(*messages: Any, system: Any = None) -> Chat:
    body = CountTokensBody.model_validate({"model": "tiny", "messages": list(messages), "system": system})
    return chat_of(body.system, body.messages, Seal())


def text(said: str) -> Any:
    return {"type": "text", "text": said}


def call(number: int) -> Any:
    return {"type": "tool_use", "id": f"toolu_{number}", "name": "now", "input": {"zone": "é"}}


def result(number: int, **fields: Any) -> Any:
    return {"type": "tool_result", "tool_use_id": f"toolu_{number}", **fields}


def test_messages_of_one_role_in_a_row_are_one() -> None:
    said = [("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"), ("user", "e"), ("system", "f")]
    assert chat(*({"role": role, "content": content} for role, content in said)) == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c\nd"},
        {"role": "user", "content": "e"},
        {"role": "system", "content": "f"},
    ]
    thoughts = [{"role": "assistant", "content": [{"type": "thinking", "thinking": each}, text("A")]} for each in "xy"]
    assert chat(*thoughts) == [{"role": "assistant", "content": "A\nA", "reasoning_content": "x\ny"}]


def test_calls_and_their_results_find_each_other() -> None:
    answers = [
        result(1, content="x"),
        result(2, content=[text("y"), text("z")], is_error=True),
        result(3),
        text("Well?"),
    ]
    found = chat(
        {"role": "assistant", "content": [text("See:"), call(1), call(2)]}, {"role": "user", "content": answers}
    )
    function = {"name": "now", "arguments": '{"zone": "é"}'}
    assert found == [
        {
            "role": "assistant",
            "content": "See:",
            "tool_calls": [{"id": name, "type": "function", "function": function} for name in ("1", "2")],
        },
        {"role": "tool", "content": "x", "tool_call_id": "1"},
        {"role": "tool", "content": "Error: y\nz", "tool_call_id": "2"},
        {"role": "tool", "content": "", "tool_call_id": "3"},
        {"role": "user", "content": "Well?"},
    ]


CALL: Any = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Which?"}],
    "tools": [{"name": name, "description": "of use", "input_schema": schema} for name, schema in SCHEMAS.items()],
    "max_tokens": 400,
    "extra_body": {"seed": 5, "logit_bias": ENDS},
}
ANY: Any = {"type": "any"}


def check_calls(message: anthropic.types.Message) -> list[tuple[str, dict[str, object]]]:
    """Assert that every call has arguments that its tool accepts. Returns the tools' names and arguments."""
    calls = [block for block in message.content if block.type == "tool_use"]
    for call in calls:
        assert call.id.startswith("toolu_")
        jsonschema.validate(call.input, SCHEMAS[call.name])
    assert len({call.id for call in calls}) == len(calls)
    return [(call.name, call.input) for call in calls]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "now"}], ids=str)
def test_a_tool_is_called_where_one_must_be(sdk: anthropic.Anthropic, choice: Any) -> None:
    asked: Any = {**CALL, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    answer = sdk.messages.create(**asked)
    assert answer.stop_reason == "tool_use"
    ((name, _),) = check_calls(answer)
    assert (len(answer.content), name) == (1, choice.get("name", name))


def test_nothing_is_called_where_nothing_may_be(sdk: anthropic.Anthropic) -> None:
    answer = sdk.messages.create(**{**CALL, "max_tokens": 8}, tool_choice={"type": "none"})
    assert text_of(answer)
    asked = {name: CALL[name] for name in ("model", "messages", "tools")}
    assert prompt_of(answer.usage) == sdk.messages.count_tokens(**asked).input_tokens


def test_a_stream_of_calls_adds_up_to_the_whole_answer(sdk: anthropic.Anthropic) -> None:
    whole = sdk.messages.create(**CALL, tool_choice=ANY)
    with sdk.messages.stream(**CALL, tool_choice=ANY) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert check_calls(final) == check_calls(whole) != []
    assert final.stop_reason == whole.stop_reason == "tool_use"
    assert "input_json" in {event.type for event in events}
    starts = [event.content_block for event in events if event.type == "content_block_start"]
    assert [block.input for block in starts if block.type == "tool_use"] == [{}] * len(check_calls(whole))


def test_an_agent_that_signals_nothing_waits_off_the_device(sdk: anthropic.Anthropic, http: httpx.Client) -> None:
    bound: Any = {"extra_headers": {"X-Session-ID": "weather-agent"}}
    first = sdk.messages.with_raw_response.create(**CALL, tool_choice=ANY, **bound)
    session = f"/v1/sessions/{first.headers['x-session-id']}"
    assert http.get(session).json()["phase"] == "io_wait"
    chosen: Any = {"type": "tool", "name": "get_weather"}
    cut = sdk.messages.create(**{**CALL, "max_tokens": 60}, tool_choice=chosen, **bound)
    assert (cut.stop_reason, [block.type for block in cut.content]) == ("max_tokens", ["tool_use"])
    assert http.get(session).json()["phase"] == "compute"  # it is no call to make
    answer = first.parse()
    results = [result(1, tool_use_id=block.id) for block in answer.content if block.type == "tool_use"]
    replies: Any = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    asked: Any = {**CALL, "messages": [*CALL["messages"], *replies], "max_tokens": 4, "tool_choice": {"type": "none"}}
    assert (sdk.messages.create(**asked, **bound).usage.cache_read_input_tokens or 0) > 0.8 * prompt_of(answer.usage)


async def test_an_input_may_have_an_integer_of_any_length() -> None:
    written = write(HERMES, ("f", json.dumps({"n": 10**40})))

    async def items() -> AsyncIterator[tuple[int, Any]]:
        for item in (TextChunk(written), TurnFinished(Ticket(1), FinishReason.STOP, TurnUsage(1, 0, 9, 0), 10)):
            yield 0, item

    told: Any = {"seal": Seal(), "shows_thoughts": True, "thinks": False, "on_calls": lambda names: None}
    writer = MessageWriter({"model": "tiny"}, 1, Answer(FamilyReader(HERMES, TOOLS)), **told)
    assert json.loads(await collect(items(), writer))["content"][0]["input"] == {"n": 10**40}


PATHS = ["/v1/messages", "/v1/messages/count_tokens"]
TOOL: Any = {"name": "now", "input_schema": {"type": "object"}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "container_upload"}]}
FOUND: Any = {"type": "tool_reference", "tool_name": "look_up"}
CALLED: Any = {"type": "tool_use", "id": "toolu_a", "name": "now", "input": {}}
CALLS_NOW: Any = {"role": "assistant", "content": [CALLED]}


@pytest.mark.parametrize("path", PATHS)
def test_an_unknown_model_is_not_found(sdk: anthropic.Anthropic, http: httpx.Client, path: str) -> None:
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        sdk.messages.create(**{**ASK, "model": "claude"})
    body = {"model": "claude", "messages": ASK["messages"]} | ({"max_tokens": 1} if path == PATHS[0] else {})
    assert "claude" in assert_messages_error(http.post(path, json=body), 404, "not_found_error")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content: a string or a list of at least 1"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}, "here read text; got the type 'think"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages.0.content.0.content.0"),
        ({"messages": [*ASK["messages"], {"role": "assistant", "content": [CALLED]}]}, "messages.1.content"),
        ({"messages": [*ASK["messages"], {"role": "assistant", "content": "so "}]}, "messages.1.content"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{**TOOL, "name": "x" * 129}]}, "tools.0.name: a string of 1 to 128 characters that matches"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tools": [{"type": "mcp_toolset"}], "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ],
)
def test_a_bad_field_is_named(sdk: anthropic.Anthropic, wrong: Any, named: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        sdk.messages.create(**ASK, extra_body=wrong)
    assert caught.value.type == "invalid_request_error"
    assert named in str(caught.value)


def test_a_context_that_does_not_fit_is_told_in_the_words_that_agents_parse(http: httpx.Client) -> None:
    most = http.get("/version").json()["max_model_len"]
    tokens = http.post(PATHS[1], json={name: ASK[name] for name in ("model", "messages")}).json()["input_tokens"]
    message = assert_messages_error(
        http.post(PATHS[0], json={**ASK, "max_tokens": 32_000}), 400, "invalid_request_error"
    )
    assert message.startswith(f"input length and `max_tokens` exceed context limit: {tokens} + 32000 > {most}, ")
    for length in (most, 1 << 18):  # the longer one is never counted
        long = http.post(PATHS[0], json={**ASK, "messages": [{"role": "user", "content": "é,1" * length}]})
        message = assert_messages_error(long, 400, "invalid_request_error")
        found = re.fullmatch(rf"prompt is too long: (\d+) tokens > {most} maximum", message)
        assert found is not None
        assert int(found[1]) > most
    chat = http.post("/v1/chat/completions", json={**ASK, "max_tokens": 32_000})
    assert chat.json()["error"]["code"] == "context_length_exceeded"


def test_a_thread_goes_on_from_what_the_server_holds(sdk: anthropic.Anthropic, http: httpx.Client) -> None:
    question: Any = {"role": "user", "content": "And now?"}
    begins: Any = {**ASK, "system": "Be kind.", "tools": [TOOL], "tool_choice": {"type": "none"}}

    def check(answer: Any) -> None:
        """It is what the whole conversation gives."""
        whole: Any = sdk.beta.messages.create(**{**begins, "messages": thread.messages[:-1]}, **GREEDY)
        assert (text_of(answer), prompt_of(answer.usage)) == (text_of(whole), prompt_of(whole.usage))
        assert (answer.stop_reason, answer.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
        assert answer.usage.output_tokens == whole.usage.output_tokens

    thread = sdk.beta.messages.thread(**begins, **GREEDY)
    thread.send()
    with thread.stream(question) as stream:
        streamed = "".join(stream.text_stream)
        check(final := cast("Any", stream.get_final_message()))
    assert streamed == text_of(final)
    going: Any = {"thread": {"type": "continue", "previous_message_id": thread.previous_message_id}}
    both = http.post(PATHS[0], json={**ASK, **going, "system": "Be kind."})
    assert assert_messages_error(both, 400, "invalid_request_error").startswith("system: ")
    http.post(PATHS[0], json={**ASK, **going}).raise_for_status()
    gone = http.post(PATHS[0], json={**ASK, **going})
    assert (gone.status_code, gone.json()["error"]["details"]) == (404, {"error_code": "thread_not_found"})
    check(thread.send(question))  # the SDK sends all of it again


@pytest.mark.parametrize("path", PATHS)
def test_what_never_reaches_the_route_has_the_same_body(http: httpx.Client, path: str) -> None:
    assert_messages_error(http.get(path), 405, "invalid_request_error")
    broken = http.post(path, content=b"{", headers={"content-type": "application/json"})
    assert_messages_error(broken, 400, "invalid_request_error")
    assert_messages_error(http.post(path, headers={"Host": "rebound.example"}, json={}), 403, "permission_error")
    assert_messages_error(http.post(f"{path}?beta=x", json=ASK), 400, "invalid_request_error")
    for encoding, status in (("br", 415), ("gzip", 400)):
        packed = http.post(path, content=b"x", headers={"content-encoding": encoding})
        assert_messages_error(packed, status, "invalid_request_error")
    assert_messages_error(http.post(f"{path}/nowhere", json=ASK), 404, "not_found_error")
    assert_messages_error(
        http.get("/v1/models/nope", headers={"anthropic-version": "2023-06-01"}), 404, "not_found_error"
    )


def test_keys_and_limits_have_their_own_words(serve_with: ServeWith, roomy_model: Path) -> None:
    http = serve_with(model=str(roomy_model), api_keys=("one", "two"), max_request_bytes=2000, strict_fields=True)
    http.headers["x-api-key"] = "wrong"
    assert_messages_error(http.post("/v1/messages", json=ASK), 401, "authentication_error")
    http.headers["x-api-key"] = "one"
    assert_messages_error(http.post("/v1/messages", json={**ASK, "system": "x" * 3000}), 413, "request_too_large")
    unknown = http.post("/v1/messages", json={**ASK, "unheard_of": 1})
    assert "unheard_of" in assert_messages_error(unknown, 400, "invalid_request_error")
    assert http.get("/v1/models?limit=20").json()["error"]["param"] == "limit"


def test_an_error_after_the_start_is_an_event(sdk: anthropic.Anthropic, http: httpx.Client) -> None:
    bound: Any = {"extra_headers": {"X-Session-ID": "cancelled-from-elsewhere"}}
    long: Any = {**ASK, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    raw = sdk.messages.with_raw_response.create(**long, **bound, stream=True)
    stream = raw.parse()
    next(iter(stream))
    assert http.post(f"/v1/sessions/{raw.headers['x-session-id']}/cancel").status_code == 200
    with pytest.raises(anthropic.APIStatusError) as caught:
        list(stream)
    body: Any = caught.value.body
    assert body["error"] == {"type": "invalid_request_error", "message": "the turn was cancelled"}
    assert body["request_id"] == raw.headers["request-id"]
