"""What is promised of the disk: what is free beside the journal's reserve."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from app.domain.values import KVBudget
from app.gpu.startup.budgets import DISK_SHARE, budget_blocks
from app.machine import disk
from app.machine.disk import DiskRoom
from app.settings import EngineSettings, Settings
from tests.serving import running_services

BLOCK_BYTES = 4096
FREE = 1000 * BLOCK_BYTES


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda folder: FREE)


def settings(kv_disk: KVBudget | None) -> EngineSettings:
    return replace(Settings().engine(), kv_device=KVBudget(bytes=1 << 20), kv_disk=kv_disk)


def disk_blocks(folder: Path, reserve: int, kv_disk: KVBudget | None = None) -> int:
    return budget_blocks(settings(kv_disk), BLOCK_BYTES, None, DiskRoom(folder, reserve)).disk


def test_kv_has_a_share_of_what_is_free_beside_the_reserve(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert disk_blocks(tmp_path, 0) == 1000 * DISK_SHARE
    assert disk_blocks(tmp_path, FREE // 2) == 500 * DISK_SHARE
    assert not caplog.records


def test_a_disk_without_its_reserve_is_promised_to_no_kv(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert disk_blocks(tmp_path, FREE + (3 << 20)) == 0
    assert caplog.messages == ["--disk-reserve: the disk lacks 3.0 MiB of it, so no KV goes there"]


def test_room_that_is_asked_for_stays_and_waits_for_the_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert disk_blocks(tmp_path, FREE + (3 << 20), KVBudget(bytes=50 * BLOCK_BYTES)) == 50
    assert caplog.messages[0].endswith("so no KV goes there until that is free")
    caplog.clear()
    assert disk_blocks(tmp_path, FREE + 1, KVBudget(bytes=0)) == 0
    assert not caplog.records


async def test_files_of_an_earlier_server_are_known_on_a_full_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are what gives way to the journal."""
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv/ses_1.safetensors").write_bytes(b"of another model")
    with caplog.at_level(logging.WARNING):
        async with running_services(state_dir=tmp_path, disk_reserve=FREE + 1):
            pass
    assert "KV files that are damaged or of another model or layout: 1" in caplog.text
