"""`kill -9` of either server, anywhere in the protocol, leaves the session with one of them, whole."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.cluster.pair import PROMPT, code, generate, open_session, pair
from tests.cluster.traps import PLACES

GOES = ("a hears that it is taken", "a has let it go", "b has written that it has it")
"""From here on it has moved, whoever dies."""


@pytest.mark.parametrize("place", PLACES)
def test_it_has_one_home_afterwards(tmp_path: Path, place: str) -> None:
    dies = place[0]
    with pair(tmp_path, start=False) as servers:
        for name in ("a", "b"):
            servers.start(name, trap=place if name == dies else None)
        session = open_session(servers.clients["a"])
        history = [*PROMPT, *generate(servers.clients["a"], session, PROMPT)["token_ids"]]
        if dies == "a":
            with pytest.raises(httpx.TransportError):
                servers.move(session)
        else:
            refused = servers.move(session)
            assert code(refused) in [(503, "peer_away"), (503, "move_unsettled")]
        assert servers.processes[dies].exit_status(10) == -9
        servers.end(dies)
        other = servers.clients["b" if dies == "a" else "a"]
        while_it_is_down = other.get(f"/v1/sessions/{session}").status_code
        assert while_it_is_down == (200 if other is servers.clients["b"] and place in GOES else while_it_is_down)
        servers.start(dies)
        home = servers.settled(session)
        assert home == ("b" if place in GOES else "a")
        found = servers.clients[home].get(f"/v1/sessions/{session}/history").json()["token_ids"]
        assert found == history
        there = "a" if home == "b" else "b"
        servers.moved(session, home, there)
        assert servers.settled(session) == there
        assert generate(servers.clients[there], session, [9])["status"] == "finished"
