"""The meter counts whole steps between its start and its end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loadgen.experiments.whitebox.concurrency import TokenMeter

SetClock = Callable[[float], None]


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """Sets the time."""
    return lambda now: monkeypatch.setattr("time.perf_counter", lambda: now)


def test_it_is_ready_when_all_have_spoken() -> None:
    meter = TokenMeter(2, seconds=1.0)
    for _ in range(3):
        meter.tokens(1, 1)
    assert not meter.ready.is_set()
    meter.tokens(0, 1)
    assert meter.ready.is_set()
    assert meter.by_second == (0,)


def test_steps_are_counted_whole(at: SetClock) -> None:
    """Two sessions with 2 tokens every 0.8 s, wherever in a step the second hand stands."""
    for start in (100.0, 100.3, 100.79):
        meter = TokenMeter(2, seconds=3.0)
        at(start)
        meter.start()
        for step in range(1, 8):
            for session in range(2):
                at(100.0 + 0.8 * step + 0.01 * session)
                meter.tokens(session, 2)
        assert meter.over.is_set()
        assert meter.tokens_per_s == pytest.approx(2 * 2 / 0.8)


def test_a_session_that_stalls_at_the_end_is_waited_for(at: SetClock) -> None:
    meter = TokenMeter(1, seconds=2.0)
    at(100.0)
    meter.start()
    for now in (100.5, 101.5):
        at(now)
        meter.tokens(0, 1)
    assert not meter.over.is_set()
    at(110.5)
    meter.tokens(0, 1)
    assert meter.over.is_set()
    assert meter.tokens_per_s == pytest.approx(2 / 10)
    assert meter.by_second == (1, 1)


def test_what_comes_later_changes_nothing(at: SetClock) -> None:
    meter = TokenMeter(1, seconds=1.0)
    at(100.0)
    meter.start()
    for now in (100.5, 101.5, 101.6):
        at(now)
        meter.tokens(0, 4)
    assert meter.tokens_per_s == 4.0
