"""`X-Session-ID`: an unmodified OpenAI client keeps its session's KV from call to call."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.errors import assert_error
from tests.openai.conftest import MODEL
from tests.openai.reference import Reference
from tests.serving import serve

ASK: Any = {"model": MODEL, "prompt": "x", "max_tokens": 4}
LONG: Any = {**ASK, "max_tokens": 900, "extra_body": {"ignore_eos": True}}


def bound(name: str) -> Any:
    return {"extra_headers": {"X-Session-ID": name}}


def session_of(http: httpx.Client, headers: Any) -> Any:
    return http.get(f"/v1/sessions/{headers['x-session-id']}").json()


def test_the_answer_does_not_depend_on_what_the_session_holds(sdk: Any, reference: Reference) -> None:
    for prompt in ("A story about a fox", "A story about a bear", "A st"):
        asked: Any = {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 12}
        expected = reference.decode(reference.greedy(reference.encode(prompt), 12))
        assert sdk.completions.create(**asked, **bound("storyteller")).choices[0].text == expected


def test_a_session_that_would_pause_is_refused_until_its_breakpoint_is_gone(sdk: Any, http: httpx.Client) -> None:
    ask: Any = {**ASK, "temperature": 0, **bound("pausing")}
    first = sdk.completions.with_raw_response.create(**ask)
    breakpoints = f"/v1/sessions/{first.headers['x-session-id']}/breakpoints"
    armed = http.post(breakpoints, json={"layer": 1, "action": "pause"}).raise_for_status().json()["id"]
    assert http.post(breakpoints, json={"layer": 1, "action": "capture"}).status_code == 201
    with pytest.raises(openai.ConflictError, match=f"pause at breakpoint {armed}.*/generate"):
        sdk.completions.create(**ask)
    http.delete(f"{breakpoints}/{armed}").raise_for_status()
    assert sdk.completions.create(**ask).choices[0].text == first.parse().choices[0].text


def test_a_session_can_be_named_by_its_id_and_is_labelled_if_the_call_opens_it(sdk: Any, http: httpx.Client) -> None:
    session = http.post("/v1/sessions", json={"metadata": {"for": "openai"}}).json()["id"]
    answer, opened = (
        sdk.completions.with_raw_response.create(**ASK, user="me", extra_body={"ignore_eos": True}, **bound(name))
        for name in (session, "labelled")
    )
    view = session_of(http, answer.headers)
    assert (view["id"], view["tokens"], view["metadata"]) == (session, 2 + 4, {"for": "openai"})
    assert session_of(http, opened.headers)["metadata"] == {"name": "labelled", "user": "me"}


def test_a_closed_session_begins_anew(sdk: Any, http: httpx.Client) -> None:
    def session() -> str:
        return str(sdk.completions.with_raw_response.create(**ASK, **bound("reborn")).headers["x-session-id"])

    first = session()
    assert http.delete(f"/v1/sessions/{first}").status_code == 204
    assert first != session()


@pytest.mark.parametrize(("method", "end"), [("POST", "/cancel"), ("DELETE", "")])
def test_a_stream_whose_session_is_taken_away_fails(sdk: Any, http: httpx.Client, method: str, end: str) -> None:
    with sdk.completions.with_streaming_response.create(**LONG, stream=True, **bound(f"taken by {method}")) as response:
        running = response.parse()
        next(iter(running))
        assert http.request(method, f"/v1/sessions/{response.headers['x-session-id']}{end}").is_success
        with pytest.raises(openai.APIError, match="cancelled"):
            list(running)


def test_a_side_call_runs_beside_a_busy_session_and_a_repeated_call_waits_for_it(sdk: Any) -> None:
    busy = sdk.completions.with_streaming_response.create(**LONG, stream=True, **bound("busy"))
    with ThreadPoolExecutor(1) as background, busy as response:
        next(iter(response.parse()))
        aside = sdk.completions.with_raw_response.create(**ASK | {"prompt": "A title"}, **bound("busy"))
        assert "x-session-id" not in aside.headers
        again = background.submit(lambda: sdk.completions.with_raw_response.create(**ASK, **bound("busy")))
        time.sleep(0.2)  # it waits, or has been refused
    assert again.result().headers["x-session-id"] == response.headers["x-session-id"]


def test_a_call_whose_session_is_taken_away_conflicts(sdk: Any, http: httpx.Client) -> None:
    headers = sdk.completions.with_raw_response.create(**ASK, **bound("taken")).headers
    with ThreadPoolExecutor(1) as background:
        call = background.submit(lambda: sdk.with_options(max_retries=2).completions.create(**LONG, **bound("taken")))
        while session_of(http, headers)["state"] != "running":
            assert not call.done()
        http.post(f"/v1/sessions/{headers['x-session-id']}/cancel")
        with pytest.raises(openai.ConflictError, match="cancelled"):
            call.result(timeout=10)


@pytest.mark.parametrize(("many", "param"), [({"n": 2}, "n"), ({"prompt": ["a", "b"]}, "prompt")])
def test_a_session_takes_one_choice_of_one_prompt(sdk: Any, many: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.completions.create(**ASK | many, **bound("single"))
    assert caught.value.param == param


def test_a_call_is_bound_to_one_session_by_a_name_of_sane_length(http: httpx.Client) -> None:
    for names in (["one", "two"], [""], ["n" * 257]):
        refused = http.post("/v1/completions", json=ASK, headers=[("X-Session-ID", name) for name in names])
        assert_error(refused, 400, "field_out_of_range", param="X-Session-ID")
    same = [("X-Session-ID", "one"), ("X-Session-ID", "one")]
    assert http.post("/v1/completions", json=ASK, headers=same).status_code == 200


UUID = "0a1b2c3d-0000-4000-8000-00000000000a"
MEND = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Mend\nthe " + 9 * "bug "}]
SAID: list[tuple[str, Any, dict[str, str], dict[str, str]]] = [
    (
        "/v1/responses",
        {"input": "What?", "store": False, "client_metadata": {"session_id": "s", "thread_id": "t"}},
        {},
        {"client_session": "s", "client_agent": "t"},
    ),
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "Who?"}], "metadata": {"user_id": f"user_1_session_{UUID}"}},
        {"X-Claude-Code-Agent-Id": "sub"},
        {"client_session": UUID, "client_agent": "sub", "user": f"user_1_session_{UUID}"},
    ),
    (
        "/v1/completions",
        {"prompt": "Ann", "user": "ann", "prompt_cache_key": "key"},
        {"x-session-affinity": "ses", "thread-id": "ses"},
        {"client_session": "ses", "user": "ann"},
    ),
    ("/v1/chat/completions", {"messages": MEND}, {}, {"name": "Mend the bug bug bug bug bug bug bug bug bug"}),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": 99 * "é"}]}]},
        {"X-Session-ID": "unheard"},
        {"name": "unheard"},
    ),
    ("/v1/messages", {"messages": [{"role": "user", "content": "<a-b>c</a-b> " + 99 * "é"}]}, {}, {"name": 60 * "é"}),
]


@pytest.mark.parametrize(("path", "body", "headers", "labels"), SAID)
def test_a_session_is_labelled_by_what_its_agent_says(
    http: httpx.Client, path: str, body: Any, headers: dict[str, str], labels: dict[str, str]
) -> None:
    """The label that people know it by comes first: lists show that."""
    most = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 4}
    answer = http.post(path, json={"model": MODEL, **most, **body}, headers=headers).raise_for_status()
    assert list(session_of(http, answer.headers)["metadata"].items()) == list(labels.items())


def test_a_token_of_this_server_binds_and_one_of_another_does_not(http: httpx.Client) -> None:
    first = http.post("/v1/completions", json=ASK).raise_for_status()
    token = first.headers["x-session-token"]
    assert token == first.headers["x-session-id"]
    calls = [
        http.post("/v1/completions", json={**ASK, "prompt": said}, headers={"x-session-token": said})
        for said in (token, "of another server")
    ]
    assert calls[0].headers["x-session-token"] == token
    assert session_of(http, first.headers)["tokens"] == calls[0].json()["usage"]["total_tokens"]
    assert calls[1].headers["x-session-token"] != token
    assert session_of(http, calls[1].headers)["metadata"] == {}


def test_a_name_means_another_session_to_another_key(reference: Reference) -> None:
    prompt = "A secret that is long enough to fill more than one block of the cache."
    answers: list[Any] = []
    with serve(model=str(reference.folder), api_keys=("one", "two")) as url:
        for key in ("one", "two"):
            with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as tenant:
                asked: Any = {"model": MODEL, "prompt": prompt, "max_tokens": 1, **bound("mine")}
                answers.append(tenant.completions.with_raw_response.create(**asked))
    assert answers[0].headers["x-session-id"] != answers[1].headers["x-session-id"]
    assert answers[1].parse().usage.prompt_tokens_details.cached_tokens == 0
