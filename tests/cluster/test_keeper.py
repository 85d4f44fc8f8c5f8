"""Replicas as children: started, started again from their own folder, drained; never two of one name."""

import contextlib
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from app import replicas as keepers
from app.replicas import NeverStarted, Plan, Replicas, ReplicaSpec, replica_specs
from tests.waiting import until

PROGRAM = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[sys.argv.index("--state-dir") + 1])
folder.mkdir(parents=True, exist_ok=True)
if "--standby" in sys.argv:
    (folder / "standby").write_text(str(os.getpid()))
    if not sys.stdin.readline():
        sys.exit(0)
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
FIRST, SECOND = "http://127.0.0.1:1001", "http://127.0.0.1:1002"


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that has died is started again at once."""
    for name, seconds in (("FIRST_WAIT_S", 0.01), ("STEADY_S", 0.0)):
        monkeypatch.setattr(keepers, name, seconds)


class FakeSpec(ReplicaSpec):
    """Starts a program that only says that it serves."""

    __slots__ = ()

    def command(self) -> list[str]:
        real = super().command()
        return [sys.executable, "-c", PROGRAM, *real[real.index("serve") :]]


def _specs(folder: Path, *, has_standby: bool = False) -> list[ReplicaSpec]:
    return [FakeSpec(name, 0, folder / name, {}, has_standby) for name in ("a", "b")]


async def _found(replicas: Replicas, **urls: str) -> None:
    await until(lambda: replicas.urls() == urls)


def _pid(file: Path) -> int:
    return int(file.read_text())


async def _standby(folder: Path, but: int = 0) -> int:
    """The process that waits there, and is not `but`."""
    found = list[int]()

    def look() -> bool:
        with contextlib.suppress(FileNotFoundError, ValueError):  # it is being written
            found[:] = {_pid(folder / "standby")} - {but}
        return bool(found)

    await until(look)
    return found[0]


async def _ended(pid: int) -> None:
    def has_ended() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:  # its parent has waited for it
            return True

    await until(has_ended)


@pytest.mark.parametrize(("how", "level"), [(signal.SIGKILL, "ERROR"), (signal.SIGINT, "INFO")])
async def test_one_that_ends_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture, how: int, level: str) -> None:
    replicas = Replicas(_specs(tmp_path))
    await _found(replicas, a=FIRST, b=FIRST)
    # A terminal's Ctrl-C goes to a whole process group, and a second one would end a replica at once.
    assert os.getpgid(0) not in [os.getpgid(_pid(tmp_path / name / "start1")) for name in ("a", "b")]
    caplog.set_level("INFO", keepers.logger.name)
    os.kill(_pid(tmp_path / "a" / "start1"), how)
    await _found(replicas, a=SECOND, b=FIRST)
    assert [each.levelname for each in caplog.records] == [level]
    await replicas.stop()
    assert (tmp_path / "a" / "drained").exists()
    assert (tmp_path / "b" / "drained").exists()
    assert not (tmp_path / "a" / "start3").exists()


async def test_who_stands_by_takes_the_place_of_one_that_dies_and_ends_with_the_cluster(tmp_path: Path) -> None:
    replicas = Replicas(_specs(tmp_path, has_standby=True))
    await _found(replicas, a=FIRST, b=FIRST)
    waiting, other = await _standby(tmp_path / "a"), await _standby(tmp_path / "b")
    os.kill(_pid(tmp_path / "a" / "start1"), signal.SIGKILL)
    await _found(replicas, a=SECOND, b=FIRST)
    assert _pid(tmp_path / "a" / "start2") == waiting
    next_one = await _standby(tmp_path / "a", but=waiting)
    await replicas.stop()
    for pid in (next_one, other):
        await _ended(pid)
    assert not (tmp_path / "a" / "start3").exists()


class MissingSpec(ReplicaSpec):
    __slots__ = ()

    def command(self) -> list[str]:
        return [str(self.state_dir)]


@pytest.mark.parametrize(
    ("kind", "says"), [(MissingSpec, "cannot be started: No such file"), (FakeSpec, "has said why")]
)
async def test_a_replica_that_can_never_be_started_ends_the_start(
    tmp_path: Path, kind: type[ReplicaSpec], says: str
) -> None:
    replicas = Replicas([kind("a", 0, tmp_path / "a", {"model": "none"})])
    with pytest.raises(NeverStarted, match=says):
        await _found(replicas, a=FIRST)
    await replicas.stop()
    assert not (tmp_path / "a" / "start2").exists()


def test_keys_are_not_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DJINN_PORT", "1")
    spec = ReplicaSpec("a", 0, tmp_path, {"api_keys": "secret"})
    assert not any("secret" in word for word in spec.command())
    environment = spec.environment()
    assert environment["DJINN_API_KEYS"] == "secret"
    assert "DJINN_PORT" not in environment


@pytest.mark.parametrize(("seen", "given"), [("0,1,2,3", "2,3"), ("GPU-a,GPU-b,GPU-c,GPU-d,GPU-e", "GPU-c,GPU-d")])
def test_each_replica_sees_gpus_that_no_other_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str, given: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    plan = Plan(replicas=2, prefill=0, standby=False, gpus=2)
    assert replica_specs(plan, tmp_path, {}, 3)[1].environment()["CUDA_VISIBLE_DEVICES"] == given
    shared = replica_specs(replace(plan, gpus=0), tmp_path, {}, 3)[1].environment()
    assert shared.get("CUDA_VISIBLE_DEVICES") == seen
