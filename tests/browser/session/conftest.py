"""A new session before its screen, for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.browser.conftest import OpenPage, close_all
from tests.browser.session.on_session import OnSession
from tests.serving import serve

TIMEOUT_S = 60


@pytest.fixture
def on(http: httpx.Client, open_page: OpenPage) -> OnSession:
    """A session without a token."""
    return OnSession(http, open_page, metadata={"agent": "tester"})


@pytest.fixture(scope="package")
def roomy_server(roomy_model: Path) -> Iterator[str]:
    """Base URL of a server with room for long histories, and for turns that do not end while a test looks at them."""
    with serve(model=str(roomy_model), max_model_len=8192, kv_device=64 << 20) as url:
        yield url


@pytest.fixture
def roomy(roomy_server: str) -> Iterator[httpx.Client]:
    """A client of that server, whose sessions are closed behind the test's pages: one that is open asks for them."""
    with httpx.Client(base_url=roomy_server, timeout=TIMEOUT_S) as api:
        yield api
        close_all(api)


@pytest.fixture
def on_roomy(roomy: httpx.Client, open_page: OpenPage) -> OnSession:
    """A session of that server."""
    return OnSession(roomy, open_page)
