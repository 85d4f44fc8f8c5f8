from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from app.doctor.disk import Disk, check_disk, read_disk
from app.doctor.findings import Status
from tests.doctor.machines import GIB

GOOD = Disk("/var/djinn", "/var", True, "ext4", 50 * GIB, 100 * GIB)


def test_a_folder_that_is_not_there_yet_is_judged_by_where_it_will_be(tmp_path: Path) -> None:
    disk = read_disk(tmp_path / "state" / "djinn")
    assert disk.folder == str(tmp_path)
    assert disk.writable
    assert disk.total_bytes == shutil.disk_usage(tmp_path).total
    assert not list(tmp_path.iterdir())


def test_a_relative_folder_is_one_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_disk(Path("state")).folder == str(tmp_path)


def test_a_place_below_a_file_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch(0o755)
    finding = check_disk(read_disk(file / "state"))
    assert finding.status is Status.ERROR
    assert f"Djinn cannot write to {file}" in finding.summary
    assert finding.remedy is not None
    assert "--state-dir" in finding.remedy


def test_a_disk_with_room_is_well() -> None:
    finding = check_disk(GOOD)
    assert (finding.status, finding.summary) == (Status.OK, "50.0 GiB free of 100.0 GiB for /var/djinn")
    assert check_disk(None).status is Status.OK


@pytest.mark.parametrize(
    ("disk", "says", "remedy"),
    [
        (replace(GOOD, file_system="tmpfs"), "gone after a restart", "--state-dir"),
        (replace(GOOD, file_system="nfs4"), "SQLite", "--state-dir"),
        (replace(GOOD, free_bytes=GIB // 2), "512.0 MiB free", "make room"),
    ],
)
def test_a_disk_that_will_disappoint_is_a_warning(disk: Disk, says: str, remedy: str) -> None:
    finding = check_disk(disk)
    assert finding.status is Status.WARNING
    assert says in finding.summary
    assert finding.remedy is not None
    assert remedy in finding.remedy


@pytest.mark.skipif(sys.platform != "linux", reason="GNU stat")
@pytest.mark.parametrize("folder", ["/dev/shm", "/proc"])
def test_the_file_system_is_what_stat_says(folder: str) -> None:
    said = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=True)
    assert read_disk(Path(folder) / "djinn").file_system == said.stdout.strip()
