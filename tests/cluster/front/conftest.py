"""A front door before two replicas of a tiny model."""

from collections.abc import Iterator

import httpx
import pytest

from tests.cluster.front.doors import Door, serving_door
from tests.serving import serve


@pytest.fixture(scope="package")
def replica_urls() -> Iterator[dict[str, str]]:
    with serve(replica="a") as a, serve(replica="b") as b:
        yield {"a": a, "b": b}


@pytest.fixture(scope="package")
def door(replica_urls: dict[str, str]) -> Iterator[Door]:
    """A front door that tests share. It has seen both replicas."""
    with serving_door(replica_urls) as found:
        yield found


@pytest.fixture
def client(door: Door) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=door.url, timeout=60) as http:
        yield http
