"""Engines in processes of their own get the connection by its descriptor."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.pair import DRAWN, PROMPT, generate, open_session, pair


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
