"""Paused sessions that leave the device, lose their KV, are cancelled or closed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from app.domain.breakpoints import Edit, EditOp, Pass, When
from app.domain.values import FinishReason, KVPolicy, Phase, Tier
from app.messages import Close
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_models import BLOCK, TinyModel, prompt, vector
from tests.gpu.breakpoints.breaking_oracle import change_of, data_of, greedy

pytestmark = pytest.mark.usefixtures("one_thread")

START = prompt(16, 5 * BLOCK + 1)
COUNT = 9
LAYER = 1
ADD = Edit(EditOp.ADD, 2.0, data_of(2 * vector(3, 48)))
PASSES = [Pass.PREFILL, Pass.DECODE]


@pytest.fixture
def tiered(tiny_llama: TinyModel, tmp_path: Path) -> BreakDriver:
    return BreakDriver(tiny_llama.engine(host_blocks=200, policy=KVPolicy.SIGNAL, kv_dir=tmp_path))


@pytest.fixture
def dropping(tiny_llama: TinyModel) -> BreakDriver:
    """Without lower tiers, and with room for one long session."""
    return BreakDriver(tiny_llama.engine(blocks=20))


@pytest.fixture
def expected(tiny_llama: TinyModel) -> list[int]:
    return greedy(tiny_llama.oracle, START, COUNT)


def pause(driver: BreakDriver, in_pass: Pass) -> Turn:
    session = driver.open()
    driver.arm(session, LAYER, when=When(in_pass))
    turn = driver.begin(session, START, COUNT)
    driver.settle(turn)
    if in_pass is Pass.DECODE:
        for _ in range(3):
            driver.resume(turn)
            driver.settle(turn)
    assert turn.paused
    return turn


def fill(driver: BreakDriver) -> None:
    """Run a turn that needs nearly the whole device."""
    session = driver.open()
    driver.settle(driver.begin(session, prompt(50, 70), 2))
    driver.do(Close(driver.ticket(), session))


@pytest.mark.parametrize("in_pass", PASSES)
@pytest.mark.parametrize("phase", [Phase.IO_WAIT, Phase.IDLE])
def test_a_paused_session_is_parked_and_comes_back(
    tiered: BreakDriver, expected: list[int], in_pass: Pass, phase: Phase
) -> None:
    turn = pause(tiered, in_pass)
    activation = tiered.read(turn)
    tiered.signal(turn.session, phase)
    assert tiered.place(turn.session).tier in {Tier.HOST, Tier.DISK, None}
    assert tiered.owned == 0
    assert turn.paused
    assert tiered.read(turn).equal(activation)
    tiered.settle(tiered.begin(tiered.open(), prompt(50, 100), 2))
    tiered.run(turn)
    assert turn.tokens == expected
    assert turn.end.usage.tokens_recomputed == 0


@pytest.mark.parametrize("in_pass", PASSES)
def test_ready_brings_a_paused_session_back_before_it_is_resumed(
    tiered: BreakDriver, expected: list[int], in_pass: Pass
) -> None:
    turn = pause(tiered, in_pass)
    before = tiered.owned
    for _ in range(2):
        tiered.signal(turn.session, Phase.IO_WAIT)
        assert tiered.owned == 0
        tiered.signal(turn.session, Phase.READY)
        assert tiered.owned == before
    tiered.run(turn)
    assert turn.tokens == expected
    assert turn.end.usage.tokens_recomputed == 0


def test_what_a_pass_has_not_run_yet_does_not_move_and_nobody_reads_it(
    tiered: BreakDriver, expected: list[int]
) -> None:
    turn = pause(tiered, Pass.PREFILL)
    layers = tiered.engine.info.num_layers
    run, pool = LAYER + 1, tiered.engine._runner.pool.data
    whole = tiered.place(turn.session)
    for _ in range(2):
        tiered.signal(turn.session, Phase.IO_WAIT)
        pool.fill_(1e4)
        tiered.signal(turn.session, Phase.READY)
    assert turn.checkpoint.first == 0
    place = tiered.place(turn.session)
    assert place.bytes_in == 2 * place.bytes_out == 2 * whole.device_bytes * run // layers
    tiered.run(turn)
    assert turn.tokens == expected
    assert turn.end.usage.tokens_recomputed == 0


@pytest.mark.parametrize("in_pass", PASSES)
def test_a_parked_session_is_edited_forked_and_resumed(
    tiered: BreakDriver, tiny_llama: TinyModel, expected: list[int], in_pass: Pass
) -> None:
    turn = pause(tiered, in_pass)
    place = turn.checkpoint.first, turn.checkpoint.end
    tiered.signal(turn.session, Phase.IO_WAIT)
    child = tiered.fork(turn)
    tiered.edit(turn, ADD)
    for each in (turn, child):
        tiered.run(each)
    change = change_of(LAYER, ADD, lambda position, _: place[0] <= position < place[1])
    assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT, [change])
    assert child.tokens == expected


@pytest.mark.parametrize("in_pass", PASSES)
def test_a_paused_session_that_loses_its_kv_computes_it_again_with_the_edits_made(
    dropping: BreakDriver, tiny_llama: TinyModel, in_pass: Pass
) -> None:
    turn = pause(dropping, in_pass)
    places = [(turn.checkpoint.first, turn.checkpoint.end)]
    dropping.edit(turn, ADD)
    fill(dropping)
    assert dropping.place(turn.session).device_bytes == 0
    dropping.resume(turn)
    dropping.settle(turn)
    if turn.paused:
        places.append((turn.checkpoint.first, turn.checkpoint.end))
        dropping.edit(turn, ADD)
        fill(dropping)
        dropping.run(turn)
    change = change_of(LAYER, ADD, lambda position, _: any(a <= position < b for a, b in places))
    assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT, [change])
    assert turn.end.usage.completion_tokens == COUNT


def test_a_prompt_in_parts_survives_the_loss_of_its_kv_between_them(tiny_llama: TinyModel) -> None:
    driver = BreakDriver(tiny_llama.engine(blocks=20, max_step_tokens=9))
    session, places = driver.open(), []
    driver.arm(session, LAYER, when=When(Pass.PREFILL))
    turn = driver.begin(session, START, COUNT)
    driver.settle(turn)
    while turn.paused:
        places.append((turn.checkpoint.first, turn.checkpoint.end))
        driver.edit(turn, ADD)
        fill(driver)
        driver.resume(turn)
        driver.settle(turn)
    assert places == [(0, 9), (9, 18), (18, 21)]
    change = change_of(LAYER, ADD, lambda position, _: position < len(START))
    assert turn.tokens == greedy(tiny_llama.oracle, START, COUNT, [change])


def test_many_paused_sessions_in_a_pool_that_is_too_small(tiny_llama: TinyModel) -> None:
    chance = random.Random(4)
    for policy, host_blocks in ((KVPolicy.NONE, 0), (KVPolicy.LRU, 100)):
        driver = BreakDriver(tiny_llama.engine(blocks=20, host_blocks=host_blocks, policy=policy))
        turns, prompts = [], [prompt(60 + k, 15 + k) for k in range(6)]
        for number, tokens in enumerate(prompts):
            session = driver.open()
            if number % 3:
                driver.arm(session, *((0, 2) if number % 2 else (1,)))
            turns.append(driver.begin(session, tokens, COUNT))
        driver.run_together(turns, chance)
        for turn, tokens in zip(turns, prompts, strict=True):
            assert turn.tokens == greedy(tiny_llama.oracle, tokens, COUNT)


@pytest.mark.parametrize("parked", [False, True], ids=["on-device", "parked"])
@pytest.mark.parametrize("in_pass", PASSES)
def test_cancel_ends_a_paused_turn_and_the_session_goes_on(
    tiered: BreakDriver, tiny_llama: TinyModel, expected: list[int], in_pass: Pass, parked: bool
) -> None:
    turn = pause(tiered, in_pass)
    generated = 0 if in_pass is Pass.PREFILL else 4
    if parked:
        tiered.signal(turn.session, Phase.IO_WAIT)
    assert tiered.cancel(turn) == len(START) + generated
    assert turn.end.reason is FinishReason.CANCELLED
    assert turn.end.usage.completion_tokens == generated
    assert turn.tokens == expected[:generated]
    history = [*START, *turn.tokens, 5]
    again = tiered.begin(turn.session, [5], 4)
    tiered.run(again)
    assert again.tokens == greedy(tiny_llama.oracle, history, 4)


def test_cancel_keeps_what_it_is_told_to_keep(tiered: BreakDriver, tiny_llama: TinyModel, expected: list[int]) -> None:
    turn = pause(tiered, Pass.DECODE)
    assert tiered.cancel(turn, keep=2) == len(START) + 2
    again = tiered.begin(turn.session, [5], 4)
    tiered.run(again)
    assert again.tokens == greedy(tiny_llama.oracle, [*START, *expected[:2], 5], 4)


@pytest.mark.parametrize("parked", [False, True], ids=["on-device", "parked"])
@pytest.mark.parametrize("in_pass", PASSES)
def test_close_frees_all_that_a_paused_session_held(tiered: BreakDriver, in_pass: Pass, parked: bool) -> None:
    turn = pause(tiered, in_pass)
    child = tiered.fork(turn)
    if parked:
        tiered.signal(turn.session, Phase.IO_WAIT)
    tiered.close(turn.session)
    assert turn.end.reason is FinishReason.CANCELLED
    tiered.close(child.session)
    tiered.move()
    memory = tiered.memory()
    assert (memory.kv_owned_bytes, memory.host.owned_bytes, memory.disk.owned_bytes) == (0, 0, 0)
    assert memory.running == memory.waiting == memory.sessions == 0
