"""What tests of several servers share."""

from collections.abc import Iterator

import pytest

from app.cluster.moves.leaving import draining
from tests.cluster.pair import Pair, pair


@pytest.fixture
def brief_farewells(monkeypatch: pytest.MonkeyPatch) -> None:
    """No front door must have looked before a server ends, and servers that all end do not wait for each other."""
    for name in ("FAREWELL_S", "ALONE_S"):
        monkeypatch.setattr(draining, name, 0.2)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both, on threads, for the tests of one file."""
    with pair(tmp_path_factory.mktemp("cluster")) as found:
        yield found
