"""A server whose long prompts another one computes says what it would have said alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.pair import DRAWN, GREEDY, Pair, generate, open_session, pair
from tests.cluster.prefill.apart import (
    PROMPT,
    ROLES,
    STEP,
    TRANSPORTS,
    WHOLE,
    acquainted,
    came,
    eventually,
    metric,
    roles,
    say,
)


@pytest.fixture(scope="module", params=TRANSPORTS)
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    by_nixl = request.param == "nixl"  # it is one for each process
    with pair(tmp_path_factory.mktemp("apart"), flags=roles(request.param), as_processes=by_nixl) as found:
        acquainted(found)
        yield found


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_it_says_what_one_server_says(servers: Pair, sampling: dict[str, Any]) -> None:
    a, b = servers.clients["a"], servers.clients["b"]
    before, served = came(a)["whole"], metric(b, "djinn_prompts_served_total")
    first, second = say(a, **sampling)
    alone = say(b, **sampling)
    assert [first["token_ids"], second["token_ids"]] == [each["token_ids"] for each in alone]
    if sampling is GREEDY:
        assert came(a)["whole"] == before + 1
        assert metric(b, "djinn_prompts_served_total") == served + 1
        assert first["usage"]["cached_tokens"] == WHOLE
    assert second["usage"]["cached_tokens"] == len(PROMPT) + 7


@pytest.mark.long
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_prompts_come_as_was_asked_for(tmp_path: Path, transport: str) -> None:
    with pair(tmp_path, flags=roles(transport), as_processes=True) as servers:
        acquainted(servers)
        for process in servers.processes.values():
            has_nixl = "nixl" in Path(f"/proc/{process.pid}/maps").read_text()
            assert has_nixl == (transport == "nixl")


def test_a_short_prompt_and_a_known_one_stay(servers: Pair) -> None:
    a = servers.clients["a"]
    say(a)
    before = came(a)
    say(a)
    generate(a, open_session(a), PROMPT[:150])
    assert came(a) == before
    session = open_session(a)
    generate(a, session, [5] * 150)
    generate(a, session, [6] * 300)
    assert came(a)["whole"] == before["whole"] + 1, "a session that goes on with a long prompt"


def test_only_a_server_that_computes_prompts_is_asked(tmp_path: Path) -> None:
    with pair(tmp_path, flags={"a": ROLES["a"], "b": STEP}) as servers:
        a = servers.clients["a"]
        eventually(lambda: "role=decode" in a.get("/ready").headers["Djinn-Load"])
        assert "role=both" in servers.clients["b"].get("/ready").headers["Djinn-Load"]
        time.sleep(1.5)
        say(a)
        assert came(a) == {"whole": 0, "part": 0, "none": 0}


def test_bits_are_those_of_one_server(tmp_path: Path) -> None:
    flags = {name: (*found, "--batch-invariant") for name, found in ROLES.items()}
    with pair(tmp_path, flags=flags) as servers:
        acquainted(servers)
        a, b = servers.clients["a"], servers.clients["b"]
        asked = {"logprobs": 3, "max_tokens": 16}
        apart = [turn["logprobs"] for turn in say(a, **asked)]
        assert came(a)["whole"] >= 2
        assert apart == [turn["logprobs"] for turn in say(b, **asked)]


@pytest.mark.long
def test_engines_of_their_own_get_the_connections(tmp_path: Path) -> None:
    with pair(tmp_path, flags=ROLES, own_engine=True) as servers:
        acquainted(servers)
        a, b = servers.clients["a"], servers.clients["b"]
        first, second = say(a)
        assert first["usage"]["cached_tokens"] == WHOLE
        assert [first["token_ids"], second["token_ids"]] == [each["token_ids"] for each in say(b)]
