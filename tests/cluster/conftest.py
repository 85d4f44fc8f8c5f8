"""What tests of several servers share."""

from collections.abc import Iterator

import pytest

from app.cluster import cluster, hop
from app.cluster.moves import draining
from tests.cluster.etcd import Etcd, running_etcd
from tests.cluster.pair import Pair, pair


@pytest.fixture(scope="package", autouse=True)
def frequent_looks() -> Iterator[None]:
    """Servers on threads look at each other five times as often: tests wait for what they see."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((hop, "LOOK_S"), (draining, "BALANCE_S"), (cluster, "SAY_S")):
            patch.setattr(module, name, getattr(module, name) / 5)
        yield


@pytest.fixture
def brief_farewells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers end before all others have heard of it, and those that all end do not wait for each other."""
    for name in ("FAREWELL_S", "ALONE_S"):
        monkeypatch.setattr(draining, name, 0.2)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both, on threads, for the tests of one file."""
    with pair(tmp_path_factory.mktemp("cluster")) as found:
        yield found


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """One for all tests: each takes another prefix, or none that others would notice."""
    with running_etcd(tmp_path_factory.mktemp("etcd")) as found:
        yield found
