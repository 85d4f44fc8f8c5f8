"""Memory that a process gives back, room on a disk, and sizes as people read them."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from app.machine.budget import DiskFull, DiskRoom
from app.machine.files import GIB, MIB, free_bytes, rate, size
from tests.file_sizes import free_on_disks

FREE_MUCH = """
import psutil
from app.machine.memory import give_back_freed
held = psutil.Process().memory_info
parts = [bytes(1000) for _ in range(100_000)]
last = bytes(1000)  # above all of them: the C library keeps what is below
full = held().rss
parts.clear()
freed = held().rss
give_back_freed()
print(full - freed, freed - held().rss)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told to give memory back")
def test_what_was_freed_goes_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", FREE_MUCH], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before < 10 * MIB
    assert after > 80 * MIB


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskRoom:
    """Room for 600 bytes beside a reserve of 400."""
    free_on_disks(monkeypatch, lambda: 1000)
    return DiskRoom(tmp_path, 400)


def test_files_under_way_share_what_is_free_beside_the_reserve(room: DiskRoom) -> None:
    with room.claiming(500):
        with pytest.raises(DiskFull, match="kept for the journal"), room.claiming(101):
            pass
        with room.claiming(100):
            pass
    with room.claiming(600):
        pass


def test_what_has_been_written_is_counted_once_and_no_bytes_need_no_room(
    room: DiskRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    with room.claiming(500) as claim:
        free_on_disks(monkeypatch, lambda: 700)
        claim.give(300)
        with room.claiming(100):
            pass
        with pytest.raises(DiskFull):
            claim.grow(101)
        claim.grow(100)
    free_on_disks(monkeypatch, lambda: 100)
    assert room.missing == 300
    with room.claiming():
        pass


def test_what_is_free_is_what_the_system_says_and_another_disk_has_no_reserve(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "there") == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    room = DiskRoom(tmp_path, 400)
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system")
    assert room.beside(tmp_path / "kv") is room
    with room.beside(memory).claiming(1000):
        pass


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0.0 MiB"), (GIB - MIB, "1023.0 MiB"), (GIB, "1.0 GiB"), (79.1 * GIB, "79.1 GiB"), (-2 * GIB, "-2.0 GiB")],
)
def test_sizes_are_in_powers_of_two_and_rates_in_powers_of_ten(nbytes: float, text: str) -> None:
    assert size(nbytes) == text
    assert rate(55.24e9) == "55.2 GB/s"
