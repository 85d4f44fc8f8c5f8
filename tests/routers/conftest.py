from collections.abc import Iterator

import httpx
import pytest


@pytest.fixture
def session(http: httpx.Client) -> Iterator[str]:
    """Path of a session of one's own."""
    path = f"/v1/sessions/{http.post('/v1/sessions').json()['id']}"
    yield path
    http.delete(path)
