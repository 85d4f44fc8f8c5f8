"""Drafts: more tokens a step, and each of them is what it would be without, to the bit. What a drafted token costs."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.domain.breakpoints import Action, When
from app.domain.values import KVPolicy, SamplingParams, StopRule
from app.gpu.engine import Engine
from app.gpu.kernels.attention import attention_for
from app.messages import Token, TurnFinished
from app.model_store.resolve import resolve
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_models import TinyModel, make_tiny, prompt
from tests.gpu.models.oracle import VOCAB
from tests.gpu.tiny_engine import greedy_tokens, make_engine
from tests.grammars.schemas import json_grammar, random_schema, regex

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(600)]


class Linear:
    """What a step costs, whatever the machine's load: so much for itself, and so much for each token."""

    def __init__(self, base: float, per_token: float) -> None:
        self.base, self.per_token = base, per_token

    def note(self, tokens: int, seconds: float) -> None:
        pass

    def seconds(self, tokens: int) -> float:
        return self.base + self.per_token * tokens


FREE = Linear(1.0, 0.0)
"""Every guess is worth a try."""


@pytest.fixture(scope="module", params=["llama", "two-layers-hybrid"])
def invariant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Its tokens depend neither on their company nor on how a prompt is cut. Layers of some fold."""
    attention = attention_for(torch.device("cpu"), batch_invariant=True)
    return make_tiny(request.param, tmp_path_factory.mktemp("model"), attention)


def state_of(driver: BreakDriver, turn: Turn) -> bytes:
    """What layers have folded the tokens of the turn's session into."""
    pool, held = driver.runner.pool, driver.sequence(turn.session).blocks
    return pool.blocks[held[len(held) - pool.state_blocks :]].flatten()[: pool.state_bytes_below[-1]].numpy().tobytes()


def drive(engine: Engine, costs: Linear = FREE) -> BreakDriver:
    driver = BreakDriver(engine)
    driver.scheduler.drafting._costs = costs  # type: ignore[assignment]
    return driver


def accepted(driver: BreakDriver) -> int:
    return driver.memory().drafts.accepted


def said(turn: Turn) -> list[object]:
    """Everything that the client was told of the turn's tokens and of its end."""
    told = list[object]()
    for event in turn.said:
        match event:
            case Token():
                told.append((event.token_id, event.logprobs))
            case TurnFinished():
                told.append((event.reason, event.usage.completion_tokens, event.history_tokens))
    return told


def repetitive(seed: int, length: int) -> list[int]:
    """A few tokens again and again, and some others between them."""
    return [*prompt(seed, 5), *(prompt(seed, 4) * length)[:length], *prompt(seed + 1, 2), *prompt(seed, 4)[:3]]


@dataclass(frozen=True)
class Asked:
    """One turn that a client wants."""

    token_ids: list[int]
    sampling: SamplingParams
    stop: StopRule


samplings = st.builds(
    SamplingParams,
    seed=st.integers(0, 9),
    temperature=st.sampled_from([0, 0, 0.02, 0.1, 1]),
    top_p=st.sampled_from([1, 1, 0.9]),
    top_k=st.sampled_from([0, 0, 5]),
    min_p=st.sampled_from([0, 0, 0.05]),
    presence_penalty=st.sampled_from([0, 0, 0.3]),
    frequency_penalty=st.sampled_from([0, 0, 0.01]),
    repetition_penalty=st.sampled_from([1, 1, 1.02]),
    logit_bias=st.sampled_from([{}, {7: 0.5}, {7: 100.0}]),
    logprobs=st.sampled_from([None, 0, 3]),
    prompt_logprobs=st.sampled_from([None, None, None, 1]),
)
stops = st.builds(
    StopRule,
    max_tokens=st.integers(0, 30),
    min_tokens=st.integers(0, 12),
    stop_token_ids=st.sampled_from([frozenset(), frozenset(range(0, VOCAB, 9)), frozenset({7})]),
)
turns_asked = st.builds(Asked, st.builds(repetitive, st.integers(0, 5), st.integers(0, 20)), samplings, stops)


def converse(driver: BreakDriver, asked: list[list[Asked]]) -> list[list[object]]:
    """Each client has a session of its own and speaks when its last turn has ended; what each of them is told."""
    sessions = [driver.open() for _ in asked]
    told: list[list[object]] = [[] for _ in asked]
    for number in range(max(map(len, asked))):
        going = [(at, turns[number]) for at, turns in enumerate(asked) if number < len(turns)]
        begun = [
            (at, driver.begin(sessions[at], each.token_ids, 0, each.sampling, stop=each.stop)) for at, each in going
        ]
        driver.settle(*(turn for _, turn in begun))
        for at, turn in begun:
            told[at] += said(turn)
    for session in sessions:
        driver.close(session)
    return told


def test_clients_are_told_the_same(invariant: TinyModel) -> None:
    """Also where some have to give way to others: drafts change when a context is recomputed, and in which parts."""
    room: dict[str, Any] = {"blocks": 46, "host_blocks": 60, "policy": KVPolicy.SIGNAL}
    drafting = drive(invariant.engine(**room))
    plain = BreakDriver(invariant.engine(**room, max_draft_tokens=0))

    @settings(suppress_health_check=list(HealthCheck))
    @given(st.lists(st.lists(turns_asked, min_size=1, max_size=2), min_size=1, max_size=4))
    def check(asked: list[list[Asked]]) -> None:
        assert converse(drafting, asked) == converse(plain, asked)

    check()
    assert drafting.memory().drafts.drafted > accepted(drafting) > 0
    assert not plain.memory().drafts.drafted
    assert drafting.memory().device.owned_bytes == 0


def test_greedy_answers_are_transformers_and_need_fewer_steps(invariant: TinyModel) -> None:
    driver, plain = drive(invariant.engine()), BreakDriver(invariant.engine(max_draft_tokens=0))
    for seed in range(4):
        turn, other = (each.turn(each.open(), repetitive(seed, 12), 40) for each in (driver, plain))
        assert turn.tokens == greedy_tokens(invariant.oracle, repetitive(seed, 12), 40)
        assert state_of(driver, turn) == state_of(plain, other)
    steps = sum(bool(plan.rows) for plan in driver.plans)
    assert steps + accepted(driver) >= 160
    assert accepted(driver) > (3 if driver.runner.pool.state_blocks else 20)


def test_a_step_has_no_more_tokens_than_it_may_and_no_draft_takes_a_block_from_anyone(tiny_llama: TinyModel) -> None:
    driver = drive(tiny_llama.engine(blocks=24, max_step_tokens=18))
    turns = [driver.begin(driver.open(), repetitive(seed, 9), 14) for seed in range(4)]
    driver.settle(*turns)
    assert all(sum(row.length for row in plan.rows) <= 18 for plan in driver.plans)
    calm = BreakDriver(tiny_llama.engine(blocks=24, max_step_tokens=18, max_draft_tokens=0))
    others = [calm.begin(calm.open(), repetitive(seed, 9), 14) for seed in range(4)]
    calm.settle(*others)
    assert [turn.tokens for turn in turns] == [turn.tokens for turn in others]
    assert sum(plan.preempted for plan in driver.plans) <= sum(plan.preempted for plan in calm.plans)
    assert accepted(driver)


GRAMMARS = {
    "a regex with much that is forced": regex("(abcabc|xyz){12}(c|d)"),
    "any of a few letters": regex("[ab]{30}"),
    "an end that comes early": regex("(ab){9}"),
    "a schema": json_grammar(random_schema(3)),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars_hold_and_answers_are_the_same(name: str) -> None:
    model = resolve("random:tiny-llama", cache_dir=Path())
    told = []
    for length in (7, 0):
        driver = drive(make_engine(model, blocks=400, max_draft_tokens=length))
        sampling = SamplingParams(seed=2, temperature=0.3, logprobs=1, grammar=GRAMMARS[name])
        history = [token % 250 for token in repetitive(3, 20)]
        turns = [driver.begin(driver.open(), history, 60, replace(sampling, seed=seed)) for seed in range(3)]
        driver.settle(*turns)
        told.append([said(turn) for turn in turns])
        assert bool(accepted(driver)) == bool(length)
        driver.engine.close()
    assert told[0] == told[1]


@pytest.mark.parametrize("action", [Action.PAUSE, Action.CAPTURE])
def test_breakpoints_see_each_position_as_they_would(tiny_llama: TinyModel, action: Action) -> None:
    told = []
    for length in (7, 3, 0):
        driver = drive(tiny_llama.engine(max_draft_tokens=length))
        session = driver.open_armed(1, 2, action=action, when=When(every=7))
        turn = driver.begin(session, repetitive(1, 20), 50)
        pauses = [(pause.layer, pause.first, pause.end) for pause in driver.run(turn)]
        captures = [(each.layer, each.positions, each.token_ids) for each in driver.captures(session).records]
        told.append((said(turn), pauses, captures))
        assert bool(accepted(driver)) == bool(length)
        assert max(len(row.draft) for plan in driver.plans for row in plan.rows) <= length
    assert told[0] == told[1] == told[2]


def test_drafts_follow_what_they_are_worth_and_sessions_that_capture_have_none(tiny_llama: TinyModel) -> None:
    """Where a token more costs as much as a step, none is drafted; where it costs nothing, all are."""
    drafted = []
    for costs, captures in ((FREE, False), (Linear(0.0, 1.0), False), (FREE, True)):
        driver = drive(tiny_llama.engine(), costs)
        session = driver.open_armed(1, action=Action.CAPTURE) if captures else driver.open()
        driver.turn(session, repetitive(1, 20), 30)
        drafted.append(driver.memory().drafts.drafted)
    assert drafted[0] > 0 == drafted[1] == drafted[2]


@pytest.mark.parametrize("tenants", ["aa", "ab"])
def test_drafts_make_a_step_that_tenants_share_a_quarter_longer_at_most(tiny_llama: TinyModel, tenants: str) -> None:
    """A step of eight tokens takes a quarter longer than one of two."""
    driver = drive(tiny_llama.engine(max_step_tokens=64), Linear(1.0, 0.05))
    turns = [driver.begin(driver.open(tenant), repetitive(n, 20), 30) for n, tenant in enumerate(tenants)]
    driver.settle(*turns)
    decodes = [plan.rows for plan in driver.plans if plan.rows and all(row.choices == row.length for row in plan.rows)]
    most = max(sum(row.length for row in rows) for rows in decodes if len(rows) == len(tenants))
    assert 2 < most <= 7 if tenants == "ab" else most > 7
