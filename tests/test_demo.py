"""`djinn demo` leaves no process behind. `djinn bench` runs the load generator. Both say why they do not start."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from app import demo as demo_module
from client import AsyncDjinn
from docs.site.pages import ROOT
from loadgen.cli import make_parser
from tests.processes import hear_interrupts
from tests.serving import serve
from tests.waiting import wait_until

SHOWN = re.compile(r"Djinn is at (http://\S+):")
SESSION = re.compile(r"is paused inside the model: http://\S+/#/sessions/(ses_\w+)/model")
WAIT_S = 100


@pytest.fixture
def demo() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """One that is up, and its address."""
    command = [sys.executable, "-m", "app", "demo", "--model", "random:tiny-llama"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=hear_interrupts) as process:
        assert process.stdout is not None
        shown = SHOWN.match(process.stdout.readline())
        assert shown is not None
        yield process, shown[1]
        if process.poll() is None:
            process.terminate()


@pytest.mark.long
def test_agents_come_and_go_with_the_server(demo: tuple[subprocess.Popen[str], str]) -> None:
    process, url = demo
    wait_until(
        lambda: any(each["tokens"] for each in httpx.get(f"{url}/v1/sessions", timeout=30).json()["data"]), WAIT_S
    )
    assert httpx.get(url, timeout=30).status_code == 200
    said = SESSION.search(process.stdout.readline() if process.stdout else "")
    assert said is not None
    wait_until(lambda: httpx.get(f"{url}/v1/sessions/{said[1]}", timeout=30).json()["state"] == "paused", WAIT_S)
    found = httpx.get(f"{url}/v1/sessions", timeout=30).json()["data"]
    assert {"planner", "translator"} <= {each["metadata"]["name"] for each in found}
    assert any(each["phase"] == "io_wait" and each["returns_at"] for each in found)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 2
    process.send_signal(signal.SIGINT)
    assert process.wait(WAIT_S) == 130
    assert psutil.wait_procs(started, timeout=WAIT_S)[1] == []


def test_a_closed_terminal_ends_it_in_order(demo: tuple[subprocess.Popen[str], str]) -> None:
    demo[0].send_signal(signal.SIGHUP)
    assert demo[0].wait(WAIT_S) == 130


def test_an_agent_keeps_its_session_when_it_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_module, "TOOL_S", (0.0, 0.0))

    async def watch(url: str) -> None:
        seen = [("", 0)]
        async with AsyncDjinn(url) as djinn, asyncio.timeout(WAIT_S):
            life = asyncio.create_task(demo_module._live(djinn, "planner", 0.0))
            while seen[-1] >= max(seen):  # another session would have a later id
                seen.extend([(each.id, each.info.tokens) async for each in djinn.sessions.list()])
            life.cancel()

    with serve() as url:
        asyncio.run(watch(url))


@pytest.mark.long
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="only Linux ends a process whose parent has died")
def test_a_demo_that_is_killed_leaves_nothing(demo: tuple[subprocess.Popen[str], str]) -> None:
    process, _ = demo
    started = psutil.Process(process.pid).children(recursive=True)
    assert started
    process.kill()
    assert psutil.wait_procs(started, timeout=WAIT_S)[1] == []


@pytest.mark.long
def test_a_server_that_does_not_start_says_why() -> None:
    command = [sys.executable, "-m", "app", "demo", "--model", "random:huge"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (ended.returncode, "tiny-llama" in ended.stderr) == (2, True)


STAND_IN = """
import json, os, sys
json.dump(sys.argv, open(os.environ["CALLED"], "w"))
sys.exit(1)
"""
"""In place of the load generator, whose experiments take minutes."""


def bench(folder: Path, module: str, code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """`djinn bench` where `module` is another one."""
    (folder / module).mkdir()
    for name in ("__init__.py", "__main__.py"):
        (folder / module / name).write_text(code)
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "CALLED": str(folder / "called")}
    command = [sys.executable, "-m", "app", "bench", *flags]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("flags", "quick", "rivals"), [("", True, None), ("--full --rivals llamacpp,ray", False, "llamacpp,ray")]
)
def test_bench_runs_the_comparisons(flags: str, quick: bool, rivals: str | None, tmp_path: Path) -> None:
    assert bench(tmp_path, "loadgen", STAND_IN, *flags.split(), "--output", str(tmp_path)).returncode == 1
    _, *arguments = json.loads((tmp_path / "called").read_text())
    options = make_parser().parse_args(arguments)
    assert (options.subcommand, options.only) == ("all", "density,capacity")
    assert (options.quick, options.rivals, options.output) == (quick, rivals, tmp_path)


def test_without_its_extra_bench_says_what_to_install(tmp_path: Path) -> None:
    done = bench(tmp_path, "lz4", "raise ModuleNotFoundError('no lz4', name='lz4')")
    assert (done.returncode, done.stderr) == (2, "loadgen: lz4 is missing: pip install 'djinn-server[loadgen]'\n")
