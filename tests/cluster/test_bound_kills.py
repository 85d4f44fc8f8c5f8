"""`kill -9` of either server leaves the session, its name and its responses with one of them."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.cluster.calling import Chain, named, sdk, status
from tests.cluster.pair import code, pair
from tests.cluster.test_kills import GOES
from tests.cluster.traps import PLACES


@pytest.mark.parametrize("place", PLACES)
def test_all_of_it_has_one_home_afterwards(tmp_path: Path, place: str) -> None:
    dies = place[0]
    with pair(tmp_path, start=False) as servers:
        for name in ("a", "b"):
            servers.start(name, trap=place if name == dies else None)
        chain = Chain("mine")
        with sdk(servers.urls["a"]) as client:
            chain.say(client, "One")
            chain.say(client, "Two")
        if dies == "a":
            with pytest.raises(httpx.TransportError):
                servers.move(chain.session)
        else:
            assert code(servers.move(chain.session)) in [(503, "peer_away"), (503, "move_unsettled")]
        assert servers.processes[dies].exit_status(10) == -9
        servers.end(dies)
        servers.start(dies)
        home = servers.settled(chain.session)
        assert home == ("b" if place in GOES else "a")
        other = "a" if home == "b" else "b"
        at_home, elsewhere = servers.clients[home], servers.clients[other]
        assert (named(at_home, "mine"), named(elsewhere, "mine")) == ([chain.session], [])
        assert [status(at_home, each) for each in chain.ids] == [200, 200]
        assert [status(elsewhere, each) for each in chain.ids] == [421 if home == "b" else 404] * 2
        servers.moved(chain.session, home, other)
        with sdk(servers.urls[other]) as client:
            assert chain.say(client, "Three").prompt > 0
        assert [status(elsewhere, each) for each in chain.ids] == [200] * 3
        assert [status(at_home, each) for each in chain.ids[:2]] == [421] * 2
