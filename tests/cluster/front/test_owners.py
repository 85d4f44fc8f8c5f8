"""The front door finds the owner of each session, and learns who is away."""

from __future__ import annotations

import select
import socket

import httpx
import numpy as np
import pytest
from openai import OpenAI
from safetensors.numpy import save
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from app.cluster.fleet import State
from app.cluster.front import look
from app.domain.session_ids import home_of, home_of_response
from tests.cluster.front.doors import AwayDirectory, Door, serving_door, serving_stub, wait_until
from tests.cluster.pair import free_port

MODEL = "tiny-llama"
TURNS = 24


def test_a_client_that_knows_the_front_door_alone_finds_its_sessions_for_many_turns(
    client: httpx.Client, replica_urls: dict[str, str]
) -> None:
    sessions = [client.post("/v1/sessions", json={}).json()["id"] for _ in range(4)]
    homes = {session: home_of(session) for session in sessions}
    assert set(homes.values()) == {"a", "b"}  # new ones go where there is room
    for turn in range(TURNS):
        session = sessions[turn % len(sessions)]
        answer = client.post(f"/v1/sessions/{session}/generate", json={"token_ids": [7, 8], "max_tokens": 1})
        assert answer.status_code == 200, answer.text
    for session, home in homes.items():
        assert home is not None
        there = httpx.get(f"{replica_urls[home]}/v1/sessions/{session}").json()
        assert there["tokens"] == 3 * TURNS // len(sessions)
        elsewhere = replica_urls["b" if home == "a" else "a"]
        assert httpx.get(f"{elsewhere}/v1/sessions/{session}").status_code == 404
        assert client.delete(f"/v1/sessions/{session}").status_code == 204


def test_a_name_stays_where_its_first_call_was(client: httpx.Client) -> None:
    def call(name: str) -> str:
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
        answer = client.post("/v1/completions", json=body, headers={"X-Session-ID": name})
        assert answer.status_code == 200, answer.text
        return answer.headers["X-Session-ID"]

    first = {name: call(name) for name in ("one", "two", "three", "four")}
    assert {home_of(session) for session in first.values()} == {"a", "b"}
    for _ in range(2):
        assert {name: call(name) for name in first} == first
    # An id is a name too.
    assert call(first["one"]) == first["one"]


def test_a_response_goes_on_where_the_one_before_is(door: Door) -> None:
    with OpenAI(base_url=f"{door.url}/v1", api_key="none", max_retries=0) as openai:
        for _ in range(2):
            first = openai.responses.create(model=MODEL, input="hi", max_output_tokens=2)
            home = home_of_response(first.id)
            assert home in ("a", "b")
            for _ in range(2):
                following = openai.responses.create(
                    model=MODEL, input="go on", max_output_tokens=2, previous_response_id=first.id
                )
                assert home_of_response(following.id) == home
                assert openai.responses.retrieve(following.id).id == following.id
                first = following


@pytest.mark.parametrize("session", ["ses_c_" + "0" * 36, "ses_" + "0" * 36, "nonsense", "%00", "ses_a_" + "0" * 36])
def test_a_session_that_nobody_has_is_not_found(client: httpx.Client, session: str) -> None:
    answer = client.get(f"/v1/sessions/{session}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


def test_without_its_directory_ids_still_name_their_owners(replica_urls: dict[str, str]) -> None:
    with serving_door(replica_urls, AwayDirectory()) as door, httpx.Client(base_url=door.url, timeout=60) as http:
        session = http.post("/v1/sessions", json={}).json()["id"]
        turn = {"token_ids": [1], "max_tokens": 1}
        assert http.post(f"/v1/sessions/{session}/generate", json=turn).status_code == 200
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
        assert http.post("/v1/completions", json=body, headers={"X-Session-ID": session}).status_code == 200
        assert http.post("/v1/completions", json=body).status_code == 200
        named = http.post("/v1/completions", json=body, headers={"X-Session-ID": "a name"})
        assert (named.status_code, named.json()["error"]["code"]) == (503, "directory_away")
        assert int(named.headers["Retry-After"]) > 0


def test_what_servers_say_among_each_other_is_not_for_clients(client: httpx.Client) -> None:
    for path in ("/v1/cluster", "/v1/cluster/sessions", "/v1/%63luster/sessions"):
        answer = client.post(path, content=b"x")
        assert answer.status_code == 404
        assert "only servers" in answer.json()["error"]["message"]


def test_a_vector_is_at_every_replica(client: httpx.Client, replica_urls: dict[str, str]) -> None:
    width = client.get("/version").json()["hidden_size"]
    file = save({"vector": np.ones(width, np.float32)})
    assert client.post("/v1/vectors?name=calm", content=file).status_code in (200, 201)
    for url in replica_urls.values():
        assert [each["name"] for each in httpx.get(f"{url}/v1/vectors").json()["data"]] == ["calm"]
    assert client.delete("/v1/vectors/calm").status_code == 204
    for url in replica_urls.values():
        assert httpx.get(f"{url}/v1/vectors").json()["data"] == []


READY = Starlette(routes=[Route("/ready", lambda request: Response())])


def test_a_replica_that_is_back_is_found_before_the_next_look_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "INTERVAL_S", 3600.0)
    port = free_port()
    with serving_door({"a": f"http://127.0.0.1:{port}"}) as door:
        replica = door.fleet.find("a")
        assert replica is not None
        assert replica.state is State.AWAY
        with serving_stub(READY, port):
            wait_until(lambda: replica.state is State.READY)


def test_a_replica_that_is_back_does_not_wait_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "PATIENCE_S", 3600.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        urls = {"a": f"http://127.0.0.1:{free_port()}", "b": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        with serving_door({"a": urls["a"]}) as door:
            door.fleet.replace(urls)
            wait_until(lambda: select.select([silent], [], [], 0)[0] != [])
            replica = door.fleet.find("a")
            assert replica is not None
            with serving_stub(READY, replica.port):
                wait_until(lambda: replica.state is State.READY)
