"""A new session before its screen, for each test."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.browser.conftest import OpenPage
from tests.browser.session.on_session import OnSession

TIMEOUT_S = 60


@pytest.fixture
def api(page_server: str) -> Iterator[httpx.Client]:
    """The HTTP API of the server behind the page."""
    with httpx.Client(base_url=page_server, timeout=TIMEOUT_S) as api:
        yield api


@pytest.fixture
def on(api: httpx.Client, open_page: OpenPage) -> OnSession:
    """A session without a token."""
    return OnSession(api, open_page, metadata={"agent": "tester"})
