"""Calls that ask for more than there is room for, and what stays of calls that are refused or left by their client."""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.errors import assert_error
from tests.openai.conftest import MODEL
from tests.openai.reference import Reference
from tests.serving import serve
from tests.waiting import wait_until

ASKED: dict[str, Any] = {"model": MODEL, "max_tokens": 2, "ignore_eos": True}
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def small(reference: Reference) -> Iterator[httpx.Client]:
    """A server for six sessions and five turns."""
    with (
        serve(model=str(reference.folder), max_sessions=6, max_queue=4, max_running=1) as url,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
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
        url = ends.enter_context(serve(model=str(reference.folder), max_queue=1, max_running=1))
        http = ends.enter_context(httpx.Client(base_url=url, timeout=30))
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
    with serve(model=str(folder)) as url, httpx.Client(base_url=url, timeout=30) as http:
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
