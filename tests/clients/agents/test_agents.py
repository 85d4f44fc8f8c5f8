"""Coding agents, unmodified and with their defaults, mend a bug in a loop of tools. Only loopback is there."""

import contextlib
import fcntl
import json
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise, takewhile
from operator import eq
from pathlib import Path
from string import Template
from typing import Any

import httpx
import pytest

from app.model_store.pull import CATALOG, pulled_folder
from app.settings import Settings
from tests.clients.agents.agents import AGENTS
from tests.clients.agents.scripted import write_scripted_model
from tests.processes import serve_process

pytestmark = [pytest.mark.agents, pytest.mark.timeout(600)]

MODEL = "smollm2-135m-instruct"
"""Whose tokenizer scripted models have."""
BUG, MENDED = "def add(a, b):\n    return a - b\n", "def add(a, b):\n    return a + b\n"
TASK = "Fix the bug in calc.py"
BLOCK = 16
"""Tokens that are cached together."""


@pytest.fixture(autouse=True)
def loopback_alone() -> None:
    """Nothing but loopback is there: `make test-agents` makes the network namespace, which has it turned off."""
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        pytest.skip("runs where no network is (make test-agents)")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        is_up = struct.pack("16sh14x", b"lo", 0x1)  # struct ifreq: the name, IFF_UP
        fcntl.ioctl(any_socket, 0x8914, is_up)  # SIOCSIFFLAGS


@contextmanager
def turns_of(url: str) -> Iterator[list[dict[str, Any]]]:
    """The turns that end while the block runs, as the live stream tells them. After it, each has its tokens.

    A side call has none, because its session ends with it. Nor has a turn that the next one replaced already.
    """
    ended: list[dict[str, Any]] = []
    listens = threading.Event()

    def read(turn: dict[str, Any]) -> None:
        token_ids = httpx.get(f"{url}/v1/sessions/{turn['session_id']}/history").json().get("token_ids", [])
        usage = turn["usage"]
        if len(token_ids) == usage["prompt_tokens"] + usage["completion_tokens"]:
            turn["token_ids"] = token_ids

    def follow() -> None:
        with (
            contextlib.suppress(httpx.TransportError),  # the server ends
            httpx.Client(timeout=None) as http,
            http.stream("GET", f"{url}/v1/events") as answer,
        ):
            for line in answer.iter_lines():
                listens.set()
                if line.startswith("data: ") and (news := json.loads(line[6:])).get("status") in ("finished", "failed"):
                    news["token_ids"] = []
                    ended.append(news)
                    reads.submit(read, news)

    with ThreadPoolExecutor(1) as reads:
        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        assert listens.wait(60)
        yield ended


def check_what_calls_share(turns: Sequence[Any]) -> None:
    """A call finds what its prompt has in common with any call before it, but for a block."""
    for number, turn in enumerate(turns):
        usage = turn["usage"]
        prompt = turn["token_ids"][: usage["prompt_tokens"]]
        pairs = (map(eq, prompt, each["token_ids"]) for each in turns[:number])
        shared = max((sum(takewhile(bool, each)) for each in pairs), default=0)
        assert usage["cached_tokens"] >= shared - BLOCK, f"call {number}"


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_mends_a_bug(tmp_path: Path, name: str) -> None:
    agent = AGENTS[name]
    programs = agent.programs()
    write_scripted_model(tmp_path / name, pulled_folder(CATALOG[MODEL], Settings().cache_dir), agent.script)
    home = tmp_path / "home"
    work = home / "work"
    work.mkdir(parents=True)
    (work / "calc.py").write_text(BUG)
    with serve_process(tmp_path / "state", "--model", str(tmp_path / name), "--kv-device", "512MiB") as server:

        def filled(text: str) -> str:
            return Template(text).substitute(URL=server.url, MODEL=name)

        for path, content in agent.files.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            (home / path).write_text(filled(content if isinstance(content, str) else json.dumps(content)))
        environment = {key: filled(value) for key, value in agent.environment.items()}
        environment |= {"HOME": str(home), "PATH": f"{programs}:/usr/bin:/bin", "TERM": "dumb"}

        def run(command: Sequence[str]) -> None:
            options: Any = {"cwd": work, "env": environment, "stdin": subprocess.DEVNULL, "timeout": 300}
            done = subprocess.run([*map(filled, command)], **options, capture_output=True, text=True, check=False)
            assert (done.returncode, (work / "calc.py").read_text()) == (0, MENDED), done.stdout + done.stderr
            time.sleep(3)  # news takes up to 0.4 s, and more beside other work

        with turns_of(server.url) as turns:
            run([*agent.command, TASK])
            first = latest = turns[:]
            for command in agent.more:
                known = len(turns)
                run(command)
                latest = turns[known:]
        one = f"{server.url}/v1/sessions/{max(first, key=lambda turn: turn['usage']['prompt_tokens'])['session_id']}"
        session, past = (httpx.get(one + path).json() for path in ("", "/timeline?limit=1000"))
    check_what_calls_share(turns)
    # Calls for a title, and those of subagents, have shorter prompts than the loop has.
    loop = sorted(first, key=lambda turn: turn["usage"]["prompt_tokens"])[-len(agent.script) :]
    assert len({turn["session_id"] for turn in loop}) == 1, "a conversation is one session"
    assert "<" not in session["metadata"].get("name", "" if session["metadata"] else "<"), "it has a name"
    waits = sum(entry["phase"] == "io_wait" for entry in past["data"] if entry["kind"] == "phase")
    print(name, session["metadata"], waits, [each["tier"] for each in past["data"] if each["kind"] == "moved"][:6])
    assert waits >= len(loop) - 1, "it waits for each of its tools"
    assert loop[-1]["token_ids"], "its tokens are what is checked"
    usages = [turn["usage"] for turn in loop]
    print(name, *(f"{usage['cached_tokens']:,} of {usage['prompt_tokens']:,};" for usage in usages))
    for before, usage in pairwise(usages):
        assert usage["cached_tokens"] >= before["prompt_tokens"] + before["completion_tokens"] - BLOCK
    longest = max(turn["usage"]["prompt_tokens"] for turn in latest)
    assert (longest < usages[-1]["prompt_tokens"]) == agent.shortens
