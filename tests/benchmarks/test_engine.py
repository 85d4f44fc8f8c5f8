"""An engine on its thread with a tiny model: what its client hears, and pauses."""

from collections.abc import Iterator
from dataclasses import astuple
from io import StringIO
from pathlib import Path
from random import Random

import pytest

from app.domain.values import SessionId
from benchmarks.breakpoints.plan import KINDS, Plan
from benchmarks.breakpoints.runner import measure_model
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
    with load(context, MODEL, **budgets) as engine:
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


MODEL = "random:tiny-llama"


def test_every_pause_and_every_kind_of_session_is_measured() -> None:
    plan = Plan(decode_pauses=5, prefill_pauses=4, decode_rounds=2, decode_steps=3)  # of 3 layers each: two prompts
    found = measure_model(MODEL, plan, [0], kv_device="8MiB")
    assert (len(found.decode_pauses), len(found.prefill_pauses)) == (5, 4)
    assert all(0 < seconds < 1 for pause in found.decode_pauses + found.prefill_pauses for seconds in astuple(pause))
    assert [entry.width for entry in found.rounds] == [1, 1, 16, 16]
    assert all(entry.rates.keys() == set(KINDS) and min(entry.rates.values()) > 0 for entry in found.rounds)
