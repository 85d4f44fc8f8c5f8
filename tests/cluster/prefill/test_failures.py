"""No turn fails for a server that was to compute its prompt, and no prompt is computed that nobody wants."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.gpu.engine import Engine
from app.gpu.kv import transport
from app.gpu.kv.moves import Move, Moved
from app.gpu.kv_pools.prompts import PromptStreams
from tests.cluster.pair import GREEDY, open_session, pair
from tests.cluster.prefill.apart import (
    LINUX,
    PROMPT,
    ROLES,
    WHOLE,
    acquainted,
    came,
    eventually,
    metric,
    roles,
    say,
)


def _after_parts(act: Callable[[], None]) -> None:
    """Act when a long prompt has been sent for a part."""
    send = PromptStreams.send

    def sends(self: PromptStreams, move: Move) -> Moved:
        sent = send(self, move)
        if len(move.token_ids) == WHOLE:
            act()
        return sent

    PromptStreams.send = sends  # type: ignore[method-assign]


def dies() -> None:
    _after_parts(lambda: os.kill(os.getpid(), signal.SIGKILL))


def hangs() -> None:
    _after_parts(lambda: time.sleep(3600))


def is_impatient() -> None:
    transport.PATIENCE_S = 1.0


def is_slow() -> None:
    launch = Engine.launch

    def launches(self: Engine) -> Any:
        if self._scheduler.has_work:
            time.sleep(0.1)
        return launch(self)

    Engine.launch = launches  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("breaks", "transport"),
    [
        (dies, "tcp"),
        pytest.param(hangs, "tcp", marks=pytest.mark.long),
        *(pytest.param(each, "nixl", marks=[pytest.mark.long, LINUX]) for each in (dies, hangs)),
    ],
)
def test_a_prompt_that_breaks_off_is_computed_to_its_end_here(
    tmp_path: Path, breaks: Callable[[], None], transport: str
) -> None:
    with pair(tmp_path, start=False, as_processes=True, flags=roles(transport)) as servers:
        a = servers.start("a", prepare=is_impatient)
        servers.start("b", prepare=breaks)
        acquainted(servers)
        first, second = say(a)
        assert 0 < first["usage"]["cached_tokens"] < WHOLE
        assert came(a)["part"] == 1
        servers.end("b")
        b = servers.start("b")
        assert [first["token_ids"], second["token_ids"]] == [each["token_ids"] for each in say(b)]


def test_a_server_that_is_away_is_not_waited_for(tmp_path: Path) -> None:
    with pair(tmp_path, flags=ROLES) as servers:
        acquainted(servers)
        a = servers.clients["a"]
        servers.end("b")
        first, _ = say(a)
        assert first["usage"]["cached_tokens"] == 0
        assert first["token_ids"] == say(servers.start("b"))[0]["token_ids"]


@pytest.mark.long
def test_a_server_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    with pair(tmp_path, as_processes=True, flags=ROLES) as servers:
        acquainted(servers)
        a = servers.clients["a"]
        os.kill(servers.processes["b"].pid, signal.SIGSTOP)
        first, _ = say(a)
        assert first["usage"]["cached_tokens"] == 0
        assert came(a)["none"] == 1
        os.kill(servers.processes["b"].pid, signal.SIGCONT)
        assert first["token_ids"] == say(servers.clients["b"])[0]["token_ids"]


@pytest.mark.parametrize(
    "other",
    [
        ("--kv-host", "0"),
        ("--model", "random:tiny-gpt2"),
        ("--block-size", "8"),
        pytest.param(("--prefill-transport", "nixl"), marks=[pytest.mark.long, LINUX]),
    ],
)
def test_a_server_that_cannot_help_hinders_nobody(tmp_path: Path, other: tuple[str, ...]) -> None:
    with pair(tmp_path, flags={**ROLES, "b": (*ROLES["b"], *other)}) as servers:
        acquainted(servers, "none")
        assert came(servers.clients["a"])["whole"] == 0


def test_without_room_on_the_host_nobody_is_asked(tmp_path: Path) -> None:
    with pair(tmp_path, flags={**ROLES, "a": (*ROLES["a"], "--kv-host", "0")}) as servers:
        a = servers.clients["a"]
        time.sleep(1.5)
        first, _ = say(a)
        assert first["usage"]["cached_tokens"] == 0
        assert came(a) == {"whole": 0, "part": 0, "none": 0}
        assert first["token_ids"] == say(servers.clients["b"])[0]["token_ids"]


def test_a_client_that_leaves_ends_the_prompt_there(tmp_path: Path) -> None:
    with pair(tmp_path, start=False, as_processes=True, flags=ROLES) as servers:
        a, b = servers.start("a"), servers.start("b", prepare=is_slow)
        acquainted(servers)
        served = metric(b, "djinn_prompts_served_total")

        def turns() -> float:
            return metric(b, "djinn_turns_running") + metric(b, "djinn_turns_waiting")

        body = {"token_ids": PROMPT, "max_tokens": 4, **GREEDY}
        session = open_session(a)
        with suppress(httpx.ReadTimeout):
            a.post(f"/v1/sessions/{session}/generate", json=body, timeout=0.4)
        eventually(lambda: turns() == 0)
        assert metric(b, "djinn_prompts_served_total") == served
        assert a.get(f"/v1/sessions/{session}").json()["state"] == "idle"
        assert say(a)[0]["usage"]["cached_tokens"] == WHOLE
