from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import serve
from tests.tenants.tenant_files import Clock, write_tenants

ServeTenants = Callable[..., Callable[[str], httpx.Client]]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def serve_tenants(tmp_path: Path, clock: Clock) -> Iterator[ServeTenants]:
    """Starts a server with these tenants; returns what makes a client with a key."""
    with ExitStack() as ends:

        def start(*tenants: dict[str, Any], **changed: Any) -> Callable[[str], httpx.Client]:
            file = write_tenants(tmp_path / "tenants.json", *tenants)
            url = ends.enter_context(serve(clock=clock, tenants=file, **changed))

            def client(api_key: str) -> httpx.Client:
                headers = {"Authorization": f"Bearer {api_key}"}
                return ends.enter_context(httpx.Client(base_url=url, timeout=30, headers=headers))

            return client

        yield start
