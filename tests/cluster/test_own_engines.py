"""Engines in processes of their own get the connection by its descriptor."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.cluster.pair import DRAWN, PROMPT, generate, open_session, pair
from tests.cluster.traps import lose_engine
from tests.engine_process.test_engine_process import until_ready


def test_a_session_moves_from_process_to_process_and_back(tmp_path: Path) -> None:
    with pair(tmp_path, own_engine=True) as servers:
        a, b = servers.clients["a"], servers.clients["b"]
        stays, moves = open_session(a), open_session(a)
        said = [generate(a, session, PROMPT, **DRAWN)["token_ids"] for session in (stays, moves)]
        gone = servers.moved(moves)
        assert gone["tokens_with_kv"] == len(PROMPT) + 7
        turn = generate(b, moves, [9], **DRAWN)
        assert turn["usage"]["cached_tokens"] == len(PROMPT) + 7
        said.append(turn["token_ids"])
        servers.moved(moves, "b", "a")
        assert said[0] == said[1]
        assert said[2] == generate(a, stays, [9], **DRAWN)["token_ids"]
        assert generate(a, moves, [11], **DRAWN)["token_ids"] == generate(a, stays, [11], **DRAWN)["token_ids"]


@pytest.mark.parametrize("is_back", [False, True])
def test_an_engine_that_dies_as_a_session_comes_is_no_loss(tmp_path: Path, is_back: bool) -> None:
    with pair(tmp_path, start=False, own_engine=True) as servers:
        a = servers.start("a")
        b = servers.start("b", prepare=partial(lose_engine, is_back))
        stays, moves = open_session(a), open_session(a)
        for session in (stays, moves):
            generate(a, session, PROMPT, **DRAWN)
        servers.moved(moves)
        until_ready(b)
        turn = generate(b, moves, [9], **DRAWN)
        assert turn["token_ids"] == generate(a, stays, [9], **DRAWN)["token_ids"]
