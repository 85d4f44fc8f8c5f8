"""What tests of restarts, kills and moves share: a server on a folder, and turns of known length."""

import contextlib
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from app.journal.journal import FILE_NAME
from tests.processes import ServerProcess
from tests.serving import serve

TOKENS = 8
"""What a turn generates unless it is told otherwise."""


@contextmanager
def serving(folder: Path, **changed: Any) -> Iterator[httpx.Client]:
    """A client of a server that keeps its sessions in `folder`."""
    with serve(state_dir=folder, **changed) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


@contextmanager
def no_room(server: ServerProcess, folder: Path) -> Iterator[None]:
    """No file of the server may grow: what a full disk is to the journal."""
    size = (folder / f"{FILE_NAME}-wal").stat().st_size
    _, unlimited = resource.prlimit(server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size, unlimited))
    yield
    with contextlib.suppress(ProcessLookupError):  # it has ended
        resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (unlimited, unlimited))


def open_session(http: httpx.Client, **body: Any) -> str:
    answer = http.post("/v1/sessions", json=body)
    assert answer.status_code == 201, answer.text
    session: str = answer.json()["id"]
    return session


def generate(http: httpx.Client, session: str, token_ids: list[int], max_tokens: int = TOKENS, **body: Any) -> Any:
    """The greedy turn's answer."""
    asked = {"token_ids": token_ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **body}
    answer = http.post(f"/v1/sessions/{session}/generate", json=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()
