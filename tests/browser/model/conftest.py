"""The inside of a new session, for each test."""

from __future__ import annotations

import httpx
import pytest

from tests.browser.conftest import OpenPage
from tests.browser.model.inside import Inside


@pytest.fixture
def inside(http: httpx.Client, open_page: OpenPage) -> Inside:
    """A session without a token, before the screen of its inside."""
    return Inside(http, open_page)
