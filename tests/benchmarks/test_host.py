"""The host's part of a decode step, with a device that takes no time."""

from collections import Counter

import pytest

from app.domain.values import SamplingParams, SessionId, StopRule, Ticket
from app.gpu.engine import Engine
from app.messages import Open, Submit, Token
from tests.gpu.kv.tiering import calls_of

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks.host import SAMPLINGS, HostPlan, NullStreams, measure_step, null_draws, null_engine

BLOCK = 16


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_every_session_gets_a_token_in_every_step(sampling: str, in_turn: bool) -> None:
    found = measure_step(3, sampling, HostPlan(context=20, steps=30, warm_up=5), in_turn=in_turn)
    assert found.tokens == 3 * 30
    assert 0 < found.p50_us <= found.p99_us
    # One copy each way, and an event behind each of them.
    assert (found.copies, found.events) == (2, 2)


class Decoding:
    """Sessions that decode on a busy device, a step ahead."""

    def __init__(self, sessions: int, sampling: SamplingParams) -> None:
        self.engine: Engine = null_engine(NullStreams(busy=True), sessions, 200)
        for number in range(sessions):
            session, prompt = SessionId(str(number)), tuple(range(number, number + 5))
            self.engine.handle(Open(Ticket(2 * number), session))
            self.engine.handle(Submit(Ticket(2 * number + 1), session, prompt, sampling, StopRule(150)))
        self.engine.step()
        self.engine.launch()

    def block(self) -> None:
        """So many steps that each session needs a new block once."""
        for _ in range(BLOCK):
            assert not self.engine.overlap()
            told = Counter(type(event) for event in self.engine.collect())
            assert set(told) == {Token}


@pytest.mark.parametrize(("sampling", "most"), [("greedy", 50), ("drawn", 57)])
def test_a_session_that_decodes_costs_the_host_a_few_calls(sampling: str, most: int) -> None:
    """A thousand calls take a tenth of a millisecond or so."""
    counts = []
    for sessions in (8, 64):
        with null_draws():
            decoding = Decoding(sessions, SAMPLINGS[sampling])
            decoding.block()
            counts.append(calls_of(decoding.block))
    few, many = counts
    assert (many - few) / 56 / BLOCK <= most
