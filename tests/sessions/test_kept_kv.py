"""KV goes to disk at the end of the server, and a disk that has stalled does not keep the server from ending."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from app.sessions import kept_kv
from app.sessions.kept_kv import keep_kv
from tests.serving import running_services


async def test_a_write_that_never_ends_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(kept_kv, "LATE_S", 0.05)
    async with running_services(state_dir=tmp_path) as services:
        with monkeypatch.context() as patched:
            patched.setattr(services.sessions.executor, "call", never)
            async with asyncio.timeout(10):
                await keep_kv(services.sessions, 0.05)
    assert [record.levelno for record in caplog.records if "has not ended" in record.message] == [logging.ERROR]
