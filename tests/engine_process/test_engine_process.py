"""A server whose engine runs in separate processes: what clients see when these die, and what they get back."""

import io
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from app.machine.cores import BOUND, CHOSEN, binding
from tests.cluster.pair import behind, pair
from tests.durability.restarting import TOKENS, generate, open_session
from tests.errors import assert_error, assert_messages_error
from tests.processes import ServerProcess, metric, serve_process, until_ready
from tests.waiting import wait_until

PROMPT = [5, 6, 7]
BACK_S = 120.0
KEY = "secret-of-the-test"


def engine_of(server: ServerProcess) -> psutil.Process:
    found = [child for child in psutil.Process(server.pid).children() if "app.engine_process" in child.cmdline()]
    assert len(found) == 1
    return found[0]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("engine") / "state"
    with serve_process(folder, "--engine-timeout-s", "5", "--api-key", KEY, own_engine=True) as server:
        yield server


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    headers = {"X-Api-Key": KEY}
    with httpx.Client(base_url=server.url, headers=headers, timeout=BACK_S) as http:
        until_ready(http)
        yield http


def running_turn(http: httpx.Client, session: str) -> tuple[threading.Thread, list[httpx.Response]]:
    """A turn of many tokens, and its answer once it has come."""
    answers: list[httpx.Response] = []
    body = {"token_ids": PROMPT, "max_tokens": 1000, "temperature": 0, "ignore_eos": True}
    before = tokens_of(http, session)

    def run() -> None:
        answers.append(http.post(f"/v1/sessions/{session}/generate", json=body))

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: tokens_of(http, session) > before + len(PROMPT))
    return thread, answers


def tokens_of(http: httpx.Client, session: str) -> int:
    found: int = http.get(f"/v1/sessions/{session}").json()["tokens"]
    return found


def test_a_turn_that_ran_can_be_repeated_and_all_else_goes_on(server: ServerProcess, http: httpx.Client) -> None:
    session, whole, closing, paused = (open_session(http) for _ in range(4))
    width = {"W_enc": (64, 8), "b_enc": 8, "threshold": 8, "W_dec": (8, 64), "b_dec": 64}
    arrays: dict[str, Any] = {name: np.ones(shape, np.float32) for name, shape in width.items()}
    np.savez(archive := io.BytesIO(), **arrays)
    fields = {"name": "ones", "layer": 1}
    http.post("/v1/dictionaries", data=fields, files={"weights": archive.getvalue()}).raise_for_status()
    reads = {"action": "features", "features": {"dictionary": "ones"}}
    http.post(f"/v1/sessions/{whole}/breakpoints", json=reads).raise_for_status()
    steer = {"layers": [1], "action": "edit", "edits": [{"op": "scale", "factor": 0.5}]}
    for each in (session, whole):
        http.post(f"/v1/sessions/{each}/breakpoints", json=steer).raise_for_status()
    http.post(f"/v1/sessions/{paused}/breakpoints", json={"layers": [0], "action": "pause"}).raise_for_status()
    brief = {"token_ids": PROMPT, "max_tokens": 3}
    assert http.post(f"/v1/sessions/{paused}/generate", json=brief).json()["status"] == "paused"
    first, before = generate(http, session, PROMPT), len(PROMPT) + TOKENS
    restarts = metric(http, "djinn_engine_restarts_total")
    thread, answers = running_turn(http, session)
    engine_of(server).kill()
    wait_until(lambda: http.get("/ready").status_code != 200)
    refused = http.post("/v1/sessions")
    if refused.status_code != 201:  # else it was back already
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_restarting")
    assert http.get("/health").status_code == http.get("/metrics").status_code == 200
    assert http.delete(f"/v1/sessions/{closing}").status_code == 204
    assert http.delete("/v1/dictionaries/ones").status_code in (409, 503), "a breakpoint needs it"
    thread.join(BACK_S)
    [answer] = answers
    assert "SIGKILL" in assert_error(answer, 503, "engine_restarting")
    assert int(answer.headers["Retry-After"]) >= 1
    until_ready(http)
    assert metric(http, "djinn_engine_restarts_total") == restarts + 1
    assert http.get("/v1/activity").json()["marks"][-1]["kind"] == "engine_restarted"
    assert metric(http, "djinn_engine_up") == 1
    assert metric(http, "djinn_sessions") == len(http.get("/v1/sessions").json()["data"])
    assert http.get(f"/v1/sessions/{closing}").status_code == 404
    found = http.get(f"/v1/sessions/{paused}").json()
    assert (found["state"], found["tokens"]) == ("idle", 0)
    assert http.post(f"/v1/sessions/{paused}/generate", json=brief).json()["status"] == "paused"
    assert tokens_of(http, session) == before
    assert [first["token_ids"], generate(http, session, PROMPT)["token_ids"]] == [
        generate(http, whole, PROMPT)["token_ids"] for _ in range(2)
    ]
    chosen = {**brief, "max_tokens": 8, "structured_outputs": {"choice": ["yes", "no"]}}
    assert http.post(f"/v1/sessions/{open_session(http)}/generate", json=chosen).json()["text"] in ("yes", "no")


@pytest.mark.long
def test_an_engine_that_hangs_is_replaced(server: ServerProcess, http: httpx.Client) -> None:
    session = open_session(http)
    tokens = generate(http, session, PROMPT)["token_ids"]
    engine = engine_of(server)
    os.kill(engine.pid, signal.SIGSTOP)
    answer = http.post(f"/v1/sessions/{session}/generate", json={"token_ids": PROMPT, "max_tokens": 3})
    assert "said nothing for 5 s" in assert_error(answer, 503, "engine_restarting")
    until_ready(http)
    assert not engine.is_running()
    assert "said nothing for 5 s; another is started" in server.output.read_text()
    assert tokens_of(http, session) == len(PROMPT) + len(tokens)


@pytest.mark.long
def test_an_engine_that_was_suspended_with_its_server_goes_on(server: ServerProcess, http: httpx.Client) -> None:
    """As by Ctrl-Z, or by a container that is paused."""
    engine, restarts = engine_of(server), metric(http, "djinn_engine_restarts_total")
    for each in (engine.pid, server.pid):
        os.kill(each, signal.SIGSTOP)
    time.sleep(6)
    os.kill(server.pid, signal.SIGCONT)
    time.sleep(2)  # the engine may be the last to run again
    os.kill(engine.pid, signal.SIGCONT)
    until_ready(http)
    generate(http, open_session(http), PROMPT)
    assert metric(http, "djinn_engine_restarts_total") == restarts
    assert engine_of(server) == engine


@pytest.mark.long
def test_an_engine_is_started_when_the_machine_has_room_again(server: ServerProcess, http: httpx.Client) -> None:
    process = psutil.Process(server.pid)
    limits = process.rlimit(psutil.RLIMIT_NOFILE)
    failures = server.output.read_text().count("no other engine could be started")
    process.rlimit(psutil.RLIMIT_NOFILE, (3, limits[1]))
    try:
        engine_of(server).kill()
        wait_until(lambda: server.output.read_text().count("no other engine could be started") > failures)
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, limits)
    until_ready(http)
    generate(http, open_session(http), PROMPT)


@pytest.mark.usefixtures("http")
def test_no_key_is_in_the_engines_environment(server: ServerProcess) -> None:
    engine = engine_of(server)
    assert not [name for name in engine.environ() if name.startswith("DJINN_")]
    assert KEY not in " ".join(engine.cmdline())


CORES = os.sched_getaffinity(0)


def choose_nothing() -> None:
    for name in CHOSEN:
        os.environ.pop(name, None)


def masks(process: psutil.Process) -> Counter[frozenset[int]]:
    """How many of its threads may use which cores."""
    return Counter(frozenset(os.sched_getaffinity(thread.id)) for thread in process.threads())


@pytest.mark.long
@pytest.mark.skipif(len(CORES) < 2, reason="one core has nothing to choose")
def test_each_thread_that_computes_has_a_core_and_all_others_have_any(tmp_path: Path) -> None:
    with serve_process(tmp_path / "state", own_engine=True, prepare=choose_nothing) as server:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            until_ready(http)
            session = http.post("/v1/sessions").json()["id"]
            turn = {"token_ids": [5, 6, 7] * 40, "max_tokens": 8, "structured_outputs": {"choice": ["yes", "no"]}}
            http.post(f"/v1/sessions/{session}/generate", json=turn).raise_for_status()
        engine = engine_of(server)
        wait_until(lambda: len([mask for mask in masks(engine) if len(mask) < len(CORES)]) > 1)
        found = masks(engine)
        assert all(number == 1 for mask, number in found.items() if len(mask) < len(CORES))
        assert os.sched_getaffinity(engine.pid) != CORES  # the thread that computes
        assert found[frozenset(CORES)] > 3
        assert set().union(*found) == CORES


@pytest.mark.parametrize("name", CHOSEN)
def test_who_has_chosen_where_threads_run_is_not_overruled(name: str) -> None:
    assert binding({name: "1"}) == {}
    assert binding({"PATH": "/bin"}) == BOUND


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One whose engine is cut over two processes."""
    folder = tmp_path_factory.mktemp("ranks") / "state"
    flags = ("--tensor-parallel", "2", "--engine-timeout-s", "5")
    with serve_process(folder, *flags, own_engine=True) as server:
        yield server


@pytest.fixture
def cut_http(cut: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cut.url, timeout=BACK_S) as http:
        until_ready(http)
        yield http


def rank_of(server: ServerProcess) -> psutil.Process:
    [found] = engine_of(server).children()
    return found


@pytest.mark.long
def test_the_engine_dies_with_a_rank_and_comes_back(cut: ServerProcess, cut_http: httpx.Client) -> None:
    session = open_session(cut_http)
    said = generate(cut_http, session, PROMPT)["token_ids"]
    before = tokens_of(cut_http, session)
    engine, rank = engine_of(cut), rank_of(cut)
    thread, answers = running_turn(cut_http, session)
    rank.kill()
    thread.join(BACK_S)
    [answer] = answers
    assert "rank 1 was ended by SIGKILL" in assert_error(answer, 503, "engine_restarting")
    wait_until(lambda: not engine.is_running())
    until_ready(cut_http)
    assert tokens_of(cut_http, session) == before
    assert generate(cut_http, open_session(cut_http), PROMPT)["token_ids"] == said


@pytest.mark.long
def test_a_rank_that_hangs_ends_the_engine_and_then_ends(cut: ServerProcess, cut_http: httpx.Client) -> None:
    engine, rank = engine_of(cut), rank_of(cut)
    os.kill(rank.pid, signal.SIGSTOP)
    session = open_session(cut_http)
    answer = cut_http.post(f"/v1/sessions/{session}/generate", json={"token_ids": PROMPT, "max_tokens": 3})
    assert "no progress for" in assert_error(answer, 503, "engine_restarting")
    os.kill(rank.pid, signal.SIGCONT)
    wait_until(lambda: not (engine.is_running() or rank.is_running()))
    until_ready(cut_http)


@pytest.mark.long
def test_ranks_end_with_the_server(cut: ServerProcess, cut_http: httpx.Client) -> None:
    rank = rank_of(cut)
    generate(cut_http, open_session(cut_http), PROMPT)
    cut.terminate()
    assert not rank.is_running()


# An engine that is suspended: what clients of each API see of it, and how it comes back.

MODEL = "tiny-llama"
READY_S, TURNS_S, AT_ONCE_S = 5.0, 10.0, 2.0
"""Within which the server says that it is not ready, turns that run have failed, and new ones are refused."""
SLACK_S = 6.0
"""For a busy machine."""
LONG: dict[str, Any] = {"max_tokens": 900, "temperature": 0}
SAID: list[Any] = [{"role": "user", "content": "Hi"}]
CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": SAID, "ignore_eos": True, **LONG},
    "/v1/completions": {"model": MODEL, "prompt": "Hi", "ignore_eos": True, **LONG},
    "/v1/responses": {"model": MODEL, "input": "Hi", "max_output_tokens": 900, "ignore_eos": True},
    "/v1/messages": {"model": MODEL, "messages": SAID, "max_tokens": 900, "ignore_eos": True},
}


@contextmanager
def suspended(process: psutil.Process) -> Iterator[None]:
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


class Asked(threading.Thread):
    """A call under way; `events` is what its stream has said, `answer` its whole answer."""

    def __init__(self, url: str, path: str, body: dict[str, Any]) -> None:
        super().__init__()
        self.url, self.path, self.body = url, path, body
        self.events: list[str] = []
        self.answer: httpx.Response | None = None
        self.ended_at = 0.0
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", f"{self.url}{self.path}", json=self.body, timeout=60) as answer:
            if answer.status_code == 200:
                self.events.extend(line for line in answer.iter_lines() if line)
            else:
                answer.read()
            self.answer = answer
        self.ended_at = time.monotonic()


@pytest.mark.long
def test_a_suspended_engine_holds_up_no_client_of_any_api_goes_on_and_ends_with_its_server(tmp_path: Path) -> None:
    """Streams that have begun end with an event of the error."""
    with (
        serve_process(tmp_path / "state", "--max-draft-tokens", "0", own_engine=True) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        until_ready(http)
        session, twin, streamed = (open_session(http) for _ in range(3))
        said = [generate(http, each, PROMPT)["token_ids"] for each in (session, twin)]
        engine, restarts = engine_of(server), metric(http, "djinn_engine_restarts_total")
        turn = {"token_ids": PROMPT, "ignore_eos": True, **LONG}
        streams = {f"/v1/sessions/{streamed}/generate": turn, **CALLS}
        paths = {f"/v1/sessions/{session}/generate": turn, **CALLS}
        begun = [Asked(server.url, path, {**body, "stream": True}) for path, body in streams.items()]
        wait_until(lambda: all(len(each.events) > 4 for each in begun))
        with suspended(engine):
            began = time.monotonic()
            waiting = [Asked(server.url, path, {**body, "stream": False}) for path, body in paths.items()]
            wait_until(lambda: http.get("/ready").status_code == 503, READY_S + SLACK_S)
            assert "said nothing for" in assert_error(http.get("/ready"), 503, "engine_stalled")
            for path, body in CALLS.items():
                asked_at = time.monotonic()
                refused = http.post(path, json=body)
                assert refused.status_code == (529 if path == "/v1/messages" else 503), refused.text
                assert refused.headers["Retry-After"] == "2"
                assert time.monotonic() - asked_at < AT_ONCE_S + SLACK_S
            for each in (*begun, *waiting):
                each.join(60)
                assert each.ended_at - began < TURNS_S + SLACK_S
            for each in begun:
                last = json.loads(
                    [line for line in each.events if line.startswith("data: {")][-1].removeprefix("data: ")
                )
                assert "makes no progress" in json.dumps(last), (each.path, last)
            for each in waiting:
                assert each.answer is not None
                assert each.answer.headers["Retry-After"] == "2"
                if each.path == "/v1/messages":
                    assert "makes no progress" in assert_messages_error(each.answer, 529)
                else:
                    assert "makes no progress" in assert_error(each.answer, 503, "engine_stalled")
            assert http.get("/health").status_code == 200
            told = http.get("/metrics", timeout=10).text
            assert "djinn_engine_up 0.0" in told.splitlines()
            assert "djinn_kv_bytes" not in told
        until_ready(http)
        assert engine.is_running()
        assert metric(http, "djinn_engine_restarts_total") == restarts
        said += [generate(http, each, PROMPT)["token_ids"] for each in (session, twin)]
        assert said[0::2] == said[1::2]
        assert "djinn_kv_bytes" in http.get("/metrics").text
        server.kill()
        wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.long
def test_no_call_is_placed_at_a_replica_whose_engine_hangs(tmp_path: Path) -> None:
    with pair(tmp_path, own_engine=True) as servers, behind(servers) as http:
        wait_until(lambda: "missing" not in http.get("/v1/sessions").json())
        open_session(servers.b)  # so that the other has more room
        call = {"model": MODEL, "prompt": "Hi", "max_tokens": 1}
        with suspended(engine_of(servers.processes["a"])):
            wait_until(lambda: servers.a.get("/ready").status_code == 503, READY_S + SLACK_S)
            wait_until(lambda: http.post("/v1/completions", json=call).status_code == 200)
            assert {http.post("/v1/completions", json=call).status_code for _ in range(30)} == {200}
