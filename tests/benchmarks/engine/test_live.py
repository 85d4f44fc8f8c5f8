"""The engine on its thread, and what its client hears when something goes wrong."""

from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from random import Random

import pytest

from app.domain.values import SessionId
from benchmarks.engine.away import Passer, check_whole, fetch, park
from benchmarks.engine.live import LiveEngine
from benchmarks.engine.loading import load
from benchmarks.gpu_check.context import StageContext
from benchmarks.gpu_check.plan import TINY
from benchmarks.gpu_check.reports.journal import Journal
from loadgen.errors import NotAsMeant

PROMPT = list(range(100, 148))
DEVICE_TOKENS = 96


@pytest.fixture(scope="module")
def live() -> Iterator[LiveEngine]:
    context = StageContext(TINY, Journal(StringIO(), has_targets=False), 0.0, Path())
    budgets = {"kv_device": f"1x{DEVICE_TOKENS}", "kv_host": f"3x{DEVICE_TOKENS}"}
    with load(context, "random:tiny-llama", **budgets) as engine:
        yield engine


def test_a_session_that_was_away_says_the_same(live: LiveEngine) -> None:
    session, other = live.open(), live.open(namespace="other")
    first = live.generate(session, PROMPT, 4).token_ids
    passer = Passer(live, Random(0), DEVICE_TOKENS)
    park(live, session)
    passer.pass_over()
    check_whole(live, fetch(live, session), len(PROMPT))
    again = live.generate(session, PROMPT[:8], 4).token_ids
    assert first == live.generate(other, PROMPT, 4).token_ids
    assert again == live.generate(other, PROMPT[:8], 4).token_ids
    live.close(session, other)


def test_what_the_engine_refuses_is_raised(live: LiveEngine) -> None:
    with pytest.raises(NotAsMeant, match="no session"):
        live.close(SessionId("nobody"))
    session = live.open()
    with pytest.raises(NotAsMeant, match="turn failed"):
        live.finish(live.resume(session))
    live.close(session)
