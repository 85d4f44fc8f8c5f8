"""Servers for the length of a block."""

from __future__ import annotations

import httpx
import psutil
import pytest

from loadgen.errors import LoadgenError
from loadgen.peers.base import ServerSettings
from loadgen.peers.serving import ManagedTarget, serving
from loadgen.processes.process import ServerFailedError
from tests.loadgen.peers.fakes import DIES, FakePeer


def test_a_server_is_up_in_the_block_and_its_log_stays(settings: ServerSettings) -> None:
    with serving(FakePeer(), settings) as served:
        assert httpx.get(f"{served.url}/v1/models").is_success
        assert psutil.pid_exists(served.pid)
    assert not psutil.pid_exists(served.pid)
    assert "child" in served.log.read_text()
    assert served.versions == {"fake": "1"}


def test_the_published_command_tells_how_but_not_where(settings: ServerSettings) -> None:
    with serving(FakePeer(), settings) as served:
        pass
    assert served.command[0] == "MODEL=tiny"
    assert served.url.endswith(f":{served.command[-1]}")


def test_a_server_that_does_not_come_up_is_reported_with_its_last_words(settings: ServerSettings) -> None:
    with pytest.raises(ServerFailedError, match=r"status 1\nno such model"), serving(FakePeer(DIES), settings):
        pass


def test_what_is_not_installed_says_what_to_do(settings: ServerSettings) -> None:
    with pytest.raises(LoadgenError, match="peers install fake"), serving(FakePeer(installed=False), settings):
        pass


async def test_a_managed_target_is_up_while_it_is_reached(settings: ServerSettings) -> None:
    target = ManagedTarget("second", FakePeer(), settings)
    assert (target.name, target.running) == ("second", None)
    async with target.reach() as spec:
        assert (spec.name, spec.model) == ("second", "model")
        assert spec.pid is not None
        assert spec.command[0] == "MODEL=tiny"
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{spec.url}/v1/models")).is_success
    assert not psutil.pid_exists(spec.pid)
