"""How the front door learns of a replica that is away."""

from __future__ import annotations

import select
import socket

import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from app.cluster.fleet import State
from app.cluster.front import look
from tests.cluster.front.doors import serving_door, serving_stub, wait_until
from tests.cluster.pair import free_port

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
