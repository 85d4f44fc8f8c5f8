"""What tests of several servers share."""

from __future__ import annotations

import pytest

from app.cluster.moves.leaving import draining


@pytest.fixture
def brief_farewells(monkeypatch: pytest.MonkeyPatch) -> None:
    """No front door must have looked before a server ends, and servers that all end do not wait for each other."""
    for name in ("FAREWELL_S", "ALONE_S"):
        monkeypatch.setattr(draining, name, 0.2)
