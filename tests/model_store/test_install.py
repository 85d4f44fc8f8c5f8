from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from app.model_store.errors import StoreFull
from app.model_store.install import install_once, require_free_space

BUILD_FOREVER = """
import sys, time
from pathlib import Path
from app.model_store.install import install_once

def build(scratch):
    (scratch / "half").write_text("half")
    print("building", flush=True)
    time.sleep(60)

install_once(Path(sys.argv[1]), build)
"""


def _write(scratch: Path) -> None:
    (scratch / "weights").write_text("whole")


def _visible(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if not path.name.endswith(".lock")]


def test_build_runs_once(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "m"
    assert install_once(folder, _write)
    assert not install_once(folder, lambda scratch: pytest.fail("built again"))
    assert (folder / "weights").read_text() == "whole"


def test_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(scratch: Path) -> None:
        _write(scratch)
        raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        install_once(tmp_path / "m", fail)
    assert _visible(tmp_path) == []


def test_killed_build_leaves_no_model_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    with subprocess.Popen(
        [sys.executable, "-c", BUILD_FOREVER, str(folder)], stdout=subprocess.PIPE, text=True
    ) as builder:
        assert builder.stdout is not None
        assert builder.stdout.readline() == "building\n"
        builder.send_signal(signal.SIGKILL)
    assert not folder.exists()
    assert install_once(folder, _write)
    assert _visible(tmp_path) == ["m"]
    assert [path.name for path in folder.iterdir()] == ["weights"]


def test_second_builder_waits_for_the_first(tmp_path: Path) -> None:
    started, go_on = threading.Event(), threading.Event()
    built: list[str] = []

    def slow(scratch: Path) -> None:
        started.set()
        go_on.wait(10)
        built.append("first")
        _write(scratch)

    def second() -> None:
        install_once(tmp_path / "m", lambda scratch: built.append("second"))

    threads = [threading.Thread(target=install_once, args=(tmp_path / "m", slow)), threading.Thread(target=second)]
    threads[0].start()
    assert started.wait(10)
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert built == ["first"]


def test_full_disk_is_named(tmp_path: Path) -> None:
    def fill(scratch: Path) -> None:
        with Path("/dev/full").open("wb") as full:
            full.write(b"x")

    with pytest.raises(StoreFull, match="full"):
        install_once(tmp_path / "m", fill)
    assert _visible(tmp_path) == []


def test_free_space_is_checked_beforehand(tmp_path: Path) -> None:
    require_free_space(tmp_path, 1)
    with pytest.raises(StoreFull, match=r"needs 931322\.6 GiB"):
        require_free_space(tmp_path, 10**15)
