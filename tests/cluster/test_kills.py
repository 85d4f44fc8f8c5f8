"""`kill -9` of either server, anywhere in the protocol, leaves a session whole with one of them, its name and its
responses too.
"""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.cluster.calling import Chain, named, sdk, status
from tests.cluster.pair import code, pair
from tests.cluster.traps import PLACES

GOES = ("a hears that it is taken", "a has let it go", "b has written that it has it")
"""From here on it has moved, whoever dies."""
UNTOUCHED = "b has been offered it"
"""`a` has sent nothing: it goes on with the session."""
EITHER = "b begins to receive it"
"""`a` may have sent all of it, into a connection that nobody reads any more, or notice before."""
QUICK = ("a hears that it is taken", "b has written that it has it")


@pytest.mark.parametrize(
    "place", [place if place in QUICK else pytest.param(place, marks=pytest.mark.long) for place in PLACES]
)
def test_it_has_one_home_afterwards(tmp_path: Path, place: str) -> None:
    dies = place[0]
    with pair(tmp_path, start=False, as_processes=True) as servers:
        for name in ("a", "b"):
            servers.start(name, trap=place if name == dies else None)
        chain = Chain("mine")
        with sdk(servers.urls["a"]) as client:
            said = [chain.say(client, text) for text in ("One", "Two")]
        history = servers.a.get(f"/v1/sessions/{chain.session}/history").json()["token_ids"]
        assert len(history) > said[-1].prompt
        if dies == "a":
            with pytest.raises(httpx.TransportError):
                servers.move(chain.session)
        else:
            status_of_move, told = code(servers.move(chain.session))
            assert status_of_move == 503
            assert told == ("peer_away" if place == UNTOUCHED else "move_unsettled") or place == EITHER
        assert servers.processes[dies].exit_status(10) == -9
        servers.end(dies)
        survivor = servers.clients["b" if dies == "a" else "a"]
        found = survivor.get(f"/v1/sessions/{chain.session}").status_code
        if dies == "a":
            assert found == (200 if place in GOES else 404)
        else:
            assert found == {"move_unsettled": 409, "peer_away": 200}[told]
        servers.start(dies)
        home = servers.settled(chain.session)
        assert home == ("b" if place in GOES else "a")
        other = "a" if home == "b" else "b"
        at_home, elsewhere = servers.clients[home], servers.clients[other]
        assert at_home.get(f"/v1/sessions/{chain.session}/history").json()["token_ids"] == history
        assert (named(at_home, "mine"), named(elsewhere, "mine")) == ([chain.session], [])
        assert [status(at_home, each) for each in chain.ids] == [200, 200]
        assert [status(elsewhere, each) for each in chain.ids] == [421 if home == "b" else 404] * 2
        servers.moved(chain.session, home, other)
        with sdk(servers.urls[other]) as client:
            assert chain.say(client, "Three").prompt > len(history)
        assert [status(elsewhere, each) for each in chain.ids] == [200] * 3
        assert [status(at_home, each) for each in chain.ids[:2]] == [421] * 2
