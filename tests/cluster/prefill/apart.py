"""A pair of servers, one of which computes the long prompts of the other."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.cluster.pair import SOON_S, Pair, generate, open_session

PROMPT = [7 + at * at % 240 for at in range(500)]
WHOLE = len(PROMPT) - 1
"""What another server computes of it."""
STEP = ("--max-step-tokens", "64", "--max-running", "32")
"""A prompt comes in many parts."""
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="NIXL is for Linux")
TRANSPORTS = ("tcp", pytest.param("nixl", marks=[pytest.mark.long, LINUX]))
ROLES = {"a": (*STEP, "--role", "decode", "--prefill-apart-tokens", "200"), "b": (*STEP, "--role", "prefill")}


def roles(transport: str) -> dict[str, tuple[str, ...]]:
    """`ROLES`, with prompts that come in this way."""
    return {name: (*flags, "--prefill-transport", transport) for name, flags in ROLES.items()}


def metric(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name} "))


def came(http: httpx.Client) -> dict[str, float]:
    """What has come of the prompts that others were to compute."""
    return {each: metric(http, f'djinn_prompts_apart_total{{came="{each}"}}') for each in ("whole", "part", "none")}


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def acquainted(servers: Pair, outcome: str = "whole") -> None:
    """Wait until `a` knows that `b` computes prompts: then it has asked for one of its own, with that outcome."""
    a, tokens = servers.clients["a"], itertools.count(3)

    def asks() -> bool:
        session = open_session(a)
        generate(a, session, [next(tokens)] * 400, max_tokens=1)
        a.delete(f"/v1/sessions/{session}").raise_for_status()
        return came(a)[outcome] > 0

    eventually(asks)


def say(http: httpx.Client, **asked: Any) -> tuple[Any, Any]:
    """Two turns of a new session, the first with the long prompt."""
    session = open_session(http)
    first = generate(http, session, PROMPT, **asked)
    return first, generate(http, session, [9], **asked)
