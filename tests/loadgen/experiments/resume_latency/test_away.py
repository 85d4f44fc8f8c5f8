"""How large the sessions must be that fill a device."""

from __future__ import annotations

from typing import Any

import pytest

from client import MemoryMap
from loadgen.errors import LoadgenError
from loadgen.experiments.resume_latency.away import passer_lengths
from tests.loadgen.experiments.whitebox.building import memory

BLOCK = 16


def server(device_tokens: int, host_tokens: int, policy: str = "signal") -> MemoryMap:
    """A server's map, with blocks of 16 tokens that take 16 bytes."""
    raw: dict[str, Any] = memory().model_dump(by_alias=True)
    data = raw["data"]
    data["block_bytes"] = data["block_tokens"] = BLOCK
    data["device"]["total_bytes"], data["host"]["total_bytes"] = device_tokens, host_tokens
    return MemoryMap.model_validate({**raw, "policy": policy})


def test_one_session_fills_all_but_a_block() -> None:
    assert passer_lengths(server(1024, 4096), "a", longest=512, max_model_len=2048) == [1008]


def test_several_do_where_one_cannot_be_so_long() -> None:
    lengths = passer_lengths(server(1024, 4096), "a", longest=300, max_model_len=400)
    assert sum(lengths) == 1008
    assert max(lengths) < 400


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (server(1024, 4096, "lru"), "start it with --kv-policy signal"),
        (server(512, 4096), "start it with --kv-device 1x768"),
        (server(1 << 20, 1 << 22), "start it with --kv-device 1x768"),
        (server(1024, 1024), "start it with --kv-host 2x1024"),
    ],
)
def test_a_server_that_cannot_be_measured_is_told_how_it_could_be(found: MemoryMap, message: str) -> None:
    with pytest.raises(LoadgenError, match=message):
        passer_lengths(found, "a", longest=512, max_model_len=2048)
