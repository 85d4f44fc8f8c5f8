"""A server whose long prompts another one computes says what it would have said alone, whatever fails."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.gpu.device.streams import Event
from app.gpu.kv import mover
from app.gpu.kv.mover import KVMover
from app.gpu.state.moves import Move, Moved, MoveKind
from tests.cluster.pair import DRAWN, GREEDY, Pair, pair
from tests.durability.restarting import generate, open_session
from tests.processes import metric
from tests.waiting import wait_until

PROMPT = [7 + at * at % 240 for at in range(500)]
WHOLE = len(PROMPT) - 1
"""What another server computes of it."""
STEP = ("--max-step-tokens", "64", "--max-running", "32")
"""A prompt comes in many parts."""
ROLES = {"a": (*STEP, "--role", "decode", "--prefill-apart-tokens", "200"), "b": (*STEP, "--role", "prefill")}


def came(http: httpx.Client) -> dict[str, float]:
    """What has come of the prompts that others were to compute."""
    return {each: metric(http, f'djinn_prompts_apart_total{{came="{each}"}}') for each in ("whole", "part", "none")}


def warm_up(a: httpx.Client) -> None:
    """Have a prompt computed that nothing breaks."""
    generate(a, open_session(a), [3] * 400, max_tokens=1)
    assert came(a)["whole"] == 1


def say(http: httpx.Client, **asked: Any) -> tuple[Any, Any]:
    """Two turns of a new session, the first with the long prompt."""
    session = open_session(http)
    first = generate(http, session, PROMPT, **asked)
    return first, generate(http, session, [9], **asked)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair(tmp_path_factory.mktemp("apart"), flags=ROLES) as found:
        yield found


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_it_says_what_one_server_says(servers: Pair, sampling: dict[str, Any]) -> None:
    a, b = servers.a, servers.b
    before, served = came(a)["whole"], metric(b, "djinn_prompts_served_total")
    first, second = say(a, **sampling)
    alone = say(b, **sampling)
    assert [first["token_ids"], second["token_ids"]] == [each["token_ids"] for each in alone]
    if sampling is GREEDY:
        assert came(a)["whole"] == before + 1
        assert metric(b, "djinn_prompts_served_total") == served + 1
        assert first["usage"]["cached_tokens"] == WHOLE
    assert second["usage"]["cached_tokens"] == len(PROMPT) + 7


def test_a_short_prompt_and_a_known_one_stay(servers: Pair) -> None:
    a = servers.a
    say(a)
    before = came(a)
    say(a)
    generate(a, open_session(a), PROMPT[:150])
    assert came(a) == before
    session = open_session(a)
    generate(a, session, [5] * 150)
    generate(a, session, [6] * 300)
    assert came(a)["whole"] == before["whole"] + 1, "a session that goes on with a long prompt"


@pytest.mark.parametrize(
    "flags",
    [
        {"a": ROLES["a"], "b": STEP},  # it does not say that it computes prompts
        pytest.param({**ROLES, "a": (*ROLES["a"], "--kv-host", "0")}, marks=pytest.mark.long),  # no room for them
    ],
)
def test_nobody_is_asked_who_does_not_compute_prompts_or_without_room(
    tmp_path: Path, flags: dict[str, tuple[str, ...]]
) -> None:
    with pair(tmp_path, flags=flags) as servers:
        time.sleep(0.5)  # until each has told its load
        first, _ = say(servers.a)
        assert first["usage"]["cached_tokens"] == 0
        assert came(servers.a) == {"whole": 0, "part": 0, "none": 0}


@pytest.mark.long
def test_bits_are_those_of_one_server(tmp_path: Path) -> None:
    flags = {name: (*found, "--batch-invariant") for name, found in ROLES.items()}
    with pair(tmp_path, flags=flags) as servers:
        apart, alone = (say(each, logprobs=3, max_tokens=16) for each in (servers.a, servers.b))
        assert came(servers.a)["whole"] == 1
        assert [turn["logprobs"] for turn in apart] == [turn["logprobs"] for turn in alone]


def _after_parts(act: Callable[[], None]) -> None:
    """Act when a long prompt has been sent for a part."""
    carry_out = KVMover.carry_out

    def carries_out(self: KVMover, move: Move, ready: Event) -> Moved:
        done = carry_out(self, move, ready)
        if move.kind is MoveKind.SEND_PROMPT and len(move.token_ids) == WHOLE:
            act()
        return done

    KVMover.carry_out = carries_out  # type: ignore[method-assign]


def dies() -> None:
    _after_parts(lambda: os.kill(os.getpid(), signal.SIGKILL))


def hangs() -> None:
    _after_parts(lambda: time.sleep(3600))


def is_impatient() -> None:
    mover.PATIENCE_S = 1.0


def is_slow() -> None:
    _after_parts(lambda: time.sleep(0.2))


@pytest.mark.parametrize("breaks", [dies, pytest.param(hangs, marks=pytest.mark.long)])
def test_a_prompt_that_breaks_off_is_computed_to_its_end_here(tmp_path: Path, breaks: Callable[[], None]) -> None:
    with pair(tmp_path, start=False, as_processes=True, flags=ROLES) as servers:
        a = servers.start("a", prepare=is_impatient)
        servers.start("b", prepare=breaks)
        warm_up(a)
        first, second = say(a)
        assert 0 < first["usage"]["cached_tokens"] < WHOLE
        assert came(a)["part"] == 1
        servers.end("b")
        b = servers.start("b")
        assert [first["token_ids"], second["token_ids"]] == [each["token_ids"] for each in say(b)]


def test_a_server_that_is_away_is_not_waited_for(tmp_path: Path) -> None:
    with pair(tmp_path, flags=ROLES) as servers:
        a = servers.a
        servers.end("b")
        first, _ = say(a)
        assert first["usage"]["cached_tokens"] == 0
        assert first["token_ids"] == say(servers.start("b"))[0]["token_ids"]


@pytest.mark.parametrize(
    "other",
    [("--kv-host", "0"), ("--model", "random:tiny-gpt2"), pytest.param(("--block-size", "8"), marks=pytest.mark.long)],
)
def test_a_server_that_cannot_help_hinders_nobody(tmp_path: Path, other: tuple[str, ...]) -> None:
    with pair(tmp_path, flags={**ROLES, "b": (*ROLES["b"], *other)}) as servers:
        say(servers.a)
        assert came(servers.a) == {"whole": 0, "part": 0, "none": 1}


def test_a_client_that_leaves_ends_the_prompt_there(tmp_path: Path) -> None:
    with pair(tmp_path, start=False, as_processes=True, flags=ROLES) as servers:
        a, b = servers.start("a"), servers.start("b", prepare=is_slow)
        warm_up(a)
        served = metric(b, "djinn_prompts_served_total")
        body = {"token_ids": PROMPT[::-1], "max_tokens": 4, **GREEDY}
        session = open_session(a)
        with suppress(httpx.ReadTimeout):
            a.post(f"/v1/sessions/{session}/generate", json=body, timeout=0.4)
        wait_until(lambda: metric(b, "djinn_turns_running") + metric(b, "djinn_turns_waiting") == 0)
        assert metric(b, "djinn_prompts_served_total") == served
        assert a.get(f"/v1/sessions/{session}").json()["state"] == "idle"
        assert say(a)[0]["usage"]["cached_tokens"] == WHOLE
