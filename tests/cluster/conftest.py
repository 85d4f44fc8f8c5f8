"""What tests of several servers share."""

from collections.abc import Iterator

import pytest

from app.cluster.front import look
from app.cluster.moves.leaving import balance, draining
from tests.cluster.pair import Pair, pair


@pytest.fixture(scope="package", autouse=True)
def frequent_looks() -> Iterator[None]:
    """Front doors and servers on threads look at each other five times as often: tests wait for what they see."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((look, "INTERVAL_S"), (look, "AWAY_INTERVAL_S"), (balance, "LOOK_S")):
            patch.setattr(module, name, getattr(module, name) / 5)
        yield


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
