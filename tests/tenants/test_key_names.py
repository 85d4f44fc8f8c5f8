"""Keys of `--api-keys`: their tenants' names tell nothing of them, and what a key owns stays with it."""

import hashlib
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load, save

from app.tenants.tenant import Key, Role, Tenant
from tests.durability.restarting import generate, open_session
from tests.journal.building import FILE
from tests.routers.generating import in_tier, wait_for
from tests.serving import serve

ANN, BOB, CLEO = "ann" * 12, "bob" * 12, "cleo" * 12


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


Clients = Callable[[str], httpx.Client]
"""Gives the client with a key."""


@contextmanager
def serving_keys(*keys: str, **changed: Any) -> Iterator[Clients]:
    with serve(api_keys=keys, **changed) as url, ExitStack() as ends:
        made: dict[str, httpx.Client] = {}

        def client(key: str) -> httpx.Client:
            if key not in made:
                made[key] = ends.enter_context(httpx.Client(base_url=url, headers={"X-Api-Key": key}, timeout=60))
            return made[key]

        yield client


def names(clients: Clients, *keys: str) -> list[str]:
    return [clients(key).post("/v1/sessions").json()["tenant"] for key in keys]


def readable(client: httpx.Client) -> list[str]:
    """The sessions whose texts the client may read: an operator sees others in the list too."""
    ids = [each["id"] for each in client.get("/v1/sessions").raise_for_status().json()["data"]]
    return [each for each in ids if client.get(f"/v1/sessions/{each}/history").is_success]


def test_names_follow_the_order_of_the_keys_and_say_nothing_of_them() -> None:
    with serving_keys(ANN) as clients:
        assert names(clients, ANN) == ["default"]
        answers = [clients(ANN).get(path).text for path in ("/v1/sessions", "/metrics", "/v1/memory")]
        assert not any(sha256(ANN)[:8] in answer for answer in answers)
    with serving_keys(ANN, BOB, ANN) as clients:
        assert names(clients, ANN, BOB) == ["key-1", "key-2"]


def test_what_a_key_owns_stays_with_it_whatever_its_place(tmp_path: Path) -> None:
    owned: dict[str, str] = {}
    with serving_keys(ANN, BOB, state_dir=tmp_path) as clients:
        for key in (ANN, BOB):
            owned[key] = open_session(clients(key))
            vector = save({"calm": np.full(64, ord(key[0]), np.float32)})
            clients(key).post("/v1/vectors", params={"name": "calm"}, content=vector).raise_for_status()
    orders = ((BOB, ANN), (BOB,), (CLEO, BOB), (ANN,), (CLEO, ANN, BOB))
    for keys in orders:
        with serving_keys(*keys, state_dir=tmp_path) as clients:
            for key in set(keys) - {CLEO}:
                assert readable(clients(key)) == [owned[key]], (keys, key)
                kept = load(clients(key).get("/v1/vectors/calm").raise_for_status().content)
                assert [each[0] for each in kept.values()] == [ord(key[0])]
            if CLEO in keys:
                assert readable(clients(CLEO)) == []
                assert clients(CLEO).get("/v1/vectors/calm").status_code == 404


def old_tenants(keys: tuple[str, ...]) -> tuple[Tenant, ...]:
    """As the version before had them."""
    return tuple(Tenant(sha256(key)[:32], (Key(sha256(key)),), Role.OPERATOR) for key in keys)


def test_sessions_of_the_version_before_are_found_and_so_is_their_kv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(5, 85))
    call = {"model": "tiny-llama", "prompt": [5], "max_tokens": 1}
    with monkeypatch.context() as patch:
        patch.setattr("app.tenants.tenancy.tenants_of_keys", old_tenants)
        with serving_keys(ANN, state_dir=tmp_path, kv_disk=64 << 20) as clients:
            session = open_session(clients(ANN))
            generate(clients(ANN), session, prompt, 4)
            assert clients(ANN).get(f"/v1/sessions/{session}").json()["tenant"] == sha256(ANN)[:32]
            clients(ANN).post(f"/v1/sessions/{session}/phase", json={"phase": "idle"}).raise_for_status()
            named = clients(ANN).post("/v1/completions", json=call, headers={"X-Session-ID": "mine"})
            wait_for(clients(ANN), f"/v1/sessions/{session}", in_tier("disk"))
    with closing(sqlite3.connect(tmp_path / FILE)) as connection, connection:
        connection.execute("DELETE FROM api_key")
    for _ in range(2):
        with serving_keys(ANN, state_dir=tmp_path, kv_disk=64 << 20) as clients:
            assert clients(ANN).get(f"/v1/sessions/{session}").json()["tenant"] == "default"
            turn = generate(clients(ANN), session, [9], 1)
            assert turn["usage"]["cached_tokens"] > 0
            again = clients(ANN).post("/v1/completions", json=call, headers={"X-Session-ID": "mine"})
            assert again.headers["x-session-id"] == named.headers["x-session-id"]
