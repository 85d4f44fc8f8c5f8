"""What goes wrong comes back as the SDK's typed exceptions and says why, also where there is no room."""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.errors import assert_error
from tests.openai.conftest import MODEL
from tests.openai.reference import Reference
from tests.serving import own_server, serve
from tests.waiting import wait_until

ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 2, "ignore_eos": True}
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def small(reference: Reference) -> Iterator[httpx.Client]:
    """A server for six sessions and five turns."""
    with own_server(model=str(reference.folder), max_sessions=6, max_queue=4, max_running=1) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompts", "n", "param", "limit"),
    [(6, 1, "prompt", "5 turns"), (1, 6, "n", "5 turns"), (2, 3, "n", "5 turns"), (2, 4, "n", "6 sessions")],
)
def test_more_choices_than_the_server_has_room_for_are_refused_before_any_work(
    small: httpx.Client, stream: bool, prompts: int, n: int, param: str, limit: str
) -> None:
    before = small.get("/v1/memory").json()
    response = small.post(PATH, json={**ASKED, "prompt": ["a"] * prompts, "n": n, "stream": stream})
    assert limit in assert_error(response, 400, "field_out_of_range", param=param)
    assert small.get("/v1/memory").json()["data"] == before["data"]


def test_as_many_choices_as_there_is_room_for_are_taken_again_and_again(small: httpx.Client) -> None:
    for prompts, n in ((5, 1), (1, 5), (2, 2)) * 3:
        body = {**ASKED, "prompt": ["a"] * prompts, "n": n}
        assert len(small.post(PATH, json=body).json()["choices"]) == prompts * n
        assert small.post(PATH, json={**body, "stream": True}).status_code == 200


def test_a_stream_whose_sessions_there_is_no_room_for_now_does_not_begin(small: httpx.Client) -> None:
    sessions = [small.post("/v1/sessions").json()["id"] for _ in range(2)]
    response = small.post(PATH, json={**ASKED, "prompt": "a", "n": 5, "stream": True})
    assert_error(response, 429, "session_limit")
    for session in sessions:
        small.delete(f"/v1/sessions/{session}")
    assert small.get("/v1/sessions").json()["data"] == []


def test_a_call_that_is_refused_leaves_no_session_of_its_name(reference: Reference) -> None:
    turn = {**ASKED, "prompt": "a", "max_tokens": 900, "stream": True}
    with ExitStack() as ends:
        http = ends.enter_context(own_server(model=str(reference.folder), max_queue=1, max_running=1))
        running = ends.enter_context(http.stream("POST", PATH, json=turn))
        chunks = running.iter_raw(1)  # kept: without it the stream would be closed
        next(chunks)
        ends.enter_context(http.stream("POST", PATH, json=turn))  # waits
        body = {**ASKED, "prompt": "a", "user": "late"}
        assert_error(http.post(PATH, json=body, headers={"X-Session-ID": "newone"}), 429, "queue_full")
        assert {"user": "late"} not in [session["metadata"] for session in http.get("/v1/sessions").json()["data"]]


def test_a_prompt_of_no_tokens_is_named_and_opens_no_session(reference: Reference, tmp_path: Path) -> None:
    folder = tmp_path / MODEL
    shutil.copytree(reference.folder, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"] = None  # which puts a token in front of every prompt
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with own_server(model=str(folder)) as http:
        for prompt, param in (("", "prompt"), (["a", ""], "prompt.1")):
            body = {**ASKED, "prompt": prompt}
            assert_error(http.post(PATH, json=body), 400, "field_out_of_range", param=param)
        bound = http.post(PATH, json={**ASKED, "prompt": ""}, headers={"X-Session-ID": "newone"})
        assert_error(bound, 400, "field_out_of_range", param="prompt")
        assert http.get("/v1/sessions").json()["data"] == []


LONG: Any = {**ASKED, "prompt": ["x", "y"], "n": 2, "max_tokens": 1000}


def memory(http: httpx.Client) -> Any:
    return http.get("/v1/memory").json()


def wait_until_idle(http: httpx.Client, *, sessions: int) -> None:
    names = ("turns_running", "turns_waiting", "sessions")
    wait_until(lambda: [memory(http)[name] for name in names] == [0, 0, sessions])


def test_a_stream_that_is_closed_frees_everything(http: httpx.Client, slow_steps: None) -> None:
    before = memory(http)
    with http.stream("POST", PATH, json={**LONG, "stream": True}) as stream:
        lines = stream.iter_lines()  # kept: without it the stream would be closed
        assert next(lines).startswith("data: {")
        assert memory(http)["turns_running"] > 0
    wait_until_idle(http, sessions=before["sessions"])
    # Conversations of other tests may have been evicted meanwhile, so less may be owned.
    assert memory(http)["data"]["device"]["owned_bytes"] <= before["data"]["device"]["owned_bytes"]


def test_a_call_that_does_not_stream_is_given_up_too(http: httpx.Client, slow_steps: None) -> None:
    before = memory(http)
    with pytest.raises(httpx.ReadTimeout):
        http.post(PATH, json=LONG, timeout=0.3)
    wait_until_idle(http, sessions=before["sessions"])


def test_a_bound_session_outlives_its_client(http: httpx.Client, slow_steps: None) -> None:
    before = memory(http)
    call = {**LONG, "prompt": "x", "n": 1, "stream": True}
    with http.stream("POST", PATH, json=call, headers={"X-Session-ID": "left"}) as stream:
        session = stream.headers["x-session-id"]
        next(stream.iter_lines())
    wait_until_idle(http, sessions=before["sessions"] + 1)
    view = http.get(f"/v1/sessions/{session}").json()
    assert view["state"] == "idle"
    assert 2 < view["tokens"] < 1000


CHAT: Any = [{"role": "user", "content": "Hello"}]
OBJECT: Any = {"type": "json_object"}
WRONG_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}


def form(name: str, schema: dict[str, str]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def reply(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "x", **fields}


def test_an_unknown_model_is_not_found(sdk: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.chat.completions.create(model="gpt-4o", messages=CHAT)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        sdk.completions.create(model="gpt-4o", prompt="x")
    with pytest.raises(openai.NotFoundError):
        sdk.models.retrieve("gpt-4o")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("size", "max_tokens"), [(2000, None), (1, 5000), (2000, 0)])
def test_more_than_the_context_is_a_bad_request(sdk: Any, stream: bool, size: int, max_tokens: int | None) -> None:
    asked: Any = {"model": MODEL, "stream": stream, "max_tokens": max_tokens}
    with pytest.raises(openai.BadRequestError, match="1024") as caught:
        sdk.chat.completions.create(**asked, messages=[{"role": "user", "content": "x" * size}])
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == ("messages" if size > 1 else "max_tokens")
    with pytest.raises(openai.BadRequestError) as newer:
        sdk.chat.completions.create(model=MODEL, messages=CHAT, max_completion_tokens=5000)
    assert newer.value.param == "max_completion_tokens"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"extra_body": {"moderation": {"model": "m", "policy": {"output": {"mode": "block"}}}}}, "moderation"),
        ({"response_format": form("a", {"type": "x"})}, "response_format.json_schema.schema"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs.regex"),
        ({"extra_body": {"structured_outputs": {"json": {}, "regex": "a"}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}, "min_tokens": 2}}, "min_tokens"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}}, "response_format": OBJECT}, "response_format"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "", "content": "x"}]}, "messages.0.role"),
        ({"messages": [*CHAT, {"role": "assistant", "content": "x", "audio": {"id": "a"}}]}, "messages.1.audio"),
        ({"messages": [reply(function_call={"name": "f", "arguments": "{}"})]}, "messages.0.function_call"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages.0.content.0.type"),
        ({"messages": [reply(content=[{"type": "refusal"}])]}, "messages.0.content.0.refusal"),
        ({"messages": [reply(content=None)]}, "messages.0.content"),
        ({"messages": [reply(tool_calls=[WRONG_CALL])]}, "messages.0.tool_calls.0.function.arguments"),
    ],
)
def test_a_bad_chat_field_is_named(sdk: Any, wrong: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.chat.completions.create(**{"model": MODEL, "messages": CHAT, **wrong})
    assert (caught.value.type, caught.value.code) == ("invalid_request_error", "field_out_of_range")
    assert str(caught.value.param).startswith(param)
    assert param.rsplit(".", 1)[-1] in caught.value.message


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1, 2], []]}, "prompt.1"),
        ({"prompt": [1, 512]}, "prompt"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 2, "n": 2}, "best_of"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"prompt": [[1], [512]]}, "prompt.1"),
    ],
)
def test_a_bad_completion_field_is_named(sdk: Any, wrong: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.completions.create(**{"model": MODEL, "prompt": "x", **wrong})
    assert caught.value.param == param


def test_a_full_queue_is_a_rate_limit_and_the_sdk_tries_again(reference: Reference) -> None:
    with serve(model=str(reference.folder), api_keys=("one",), max_queue=1, max_running=1) as url:
        client: Any = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model=MODEL, messages=CHAT)
        client = client.with_options(api_key="one")
        asked: Any = {"model": MODEL, "prompt": "x", "max_tokens": 900, "extra_body": {"ignore_eos": True}}
        running = client.completions.create(**asked, stream=True)
        next(iter(running))
        waiting = client.completions.create(**asked, stream=True)
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(**asked)
        assert caught.value.response.headers["retry-after"] == "1"
        running.close()
        waiting.close()
        patient = client.with_options(max_retries=5)
        assert patient.completions.create(model=MODEL, prompt="x", max_tokens=1).choices
        client.close()
