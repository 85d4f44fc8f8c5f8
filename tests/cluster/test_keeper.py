"""Replicas as children: started, started again from their own folder, drained; never two of one name."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from app.cluster import keeper as keepers
from app.cluster.hosts import LocalHost, NeverStarted
from app.cluster.keeper import ReplicaSpec

PROGRAM = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--state-dir") + 1])
folder.mkdir(parents=True, exist_ok=True)
starts = len(list(folder.glob("start*"))) + 1
(folder / f"start{starts}").write_text(str(os.getpid()))
if os.environ.get("DJINN_MODEL") == "none":
    sys.exit(2)
def end(*_):
    (folder / "drained").touch()
    sys.exit(0)
signal.signal(signal.SIGINT, end)  # drain, and move nothing
print("a line of another kind")
print(f"Djinn serves tiny on http://127.0.0.1:{1000 + starts}", flush=True)
while True:
    time.sleep(1)
"""
LOOKS = 3000
FIRST, SECOND = "http://127.0.0.1:1001", "http://127.0.0.1:1002"


class FakeSpec(ReplicaSpec):
    """Starts a program that only says that it serves."""

    __slots__ = ()

    def command(self) -> list[str]:
        """Without PyTorch."""
        real = super().command()
        return [sys.executable, "-c", PROGRAM, *real[real.index("serve") :]]


def _specs(folder: Path, **settings: str) -> list[ReplicaSpec]:
    return [FakeSpec(name, "127.0.0.1", 0, folder / name, settings) for name in ("a", "b")]


async def _found(host: LocalHost, **urls: str) -> None:
    """Return when the replicas listen there."""
    for _ in range(LOOKS):
        if await host.urls() == urls:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(await host.urls())


async def test_a_replica_that_dies_comes_back_from_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keepers, "FIRST_WAIT_S", 0.01)
    host = LocalHost(_specs(tmp_path), None)
    await host.start()
    await _found(host, a=FIRST, b=FIRST)
    os.kill(int((tmp_path / "a" / "start1").read_text()), signal.SIGKILL)
    await _found(host, a=SECOND, b=FIRST)
    await host.stop()
    assert (tmp_path / "a" / "drained").exists()
    assert (tmp_path / "b" / "drained").exists()
    assert not (tmp_path / "a" / "start3").exists()


async def test_settings_that_no_replica_takes_end_the_start(tmp_path: Path) -> None:
    host = LocalHost(_specs(tmp_path, model="none"), None)
    await host.start()
    with pytest.raises(NeverStarted, match="has said why"):
        await _found(host, a=FIRST, b=FIRST)
    await host.stop()
    assert not (tmp_path / "a" / "start2").exists()


def test_keys_are_not_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DJINN_PORT", "1")
    spec = ReplicaSpec("a", "127.0.0.1", 0, tmp_path, {"api_keys": "secret"})
    assert not any("secret" in word for word in spec.command())
    environment = spec.environment()
    assert environment["DJINN_API_KEYS"] == "secret"
    assert "DJINN_PORT" not in environment
