"""Engines whose layers are cut over two processes: clients are told what one process, and Transformers, would say."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from app.domain.breakpoints import Action
from app.domain.errors import FieldOutOfRange
from app.domain.points import BETWEEN, Point
from app.domain.values import KVPolicy, Phase, SamplingParams, SessionId
from app.gpu.kernels.attention.base import make_batch
from app.gpu.ranks.follower import Run
from app.gpu.startup.loader import load_engine
from app.messages import Export, Fork, Import, Token
from app.settings import Settings
from tests.gpu.breakpoints.breaking import BreakDriver
from tests.gpu.breakpoints.breaking_models import BLOCK, TinyModel, make_tiny, prompt
from tests.gpu.breakpoints.breaking_oracle import tensor_of
from tests.gpu.conversations import CROWD, same
from tests.gpu.tiny_engine import greedy_tokens

pytestmark = pytest.mark.usefixtures("one_thread")
TIERS: dict[str, Any] = {"host_blocks": 100, "policy": KVPolicy.SIGNAL}
CPU = torch.device("cpu")
REPORTING = SamplingParams(seed=0, temperature=0, logprobs=2)


@pytest.fixture(scope="module")
def two(tiny_llama: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BreakDriver]:
    """An engine of two ranks with all tiers."""
    engine = replace(tiny_llama, ranks=2).engine(**TIERS, kv_dir=tmp_path_factory.mktemp("kv"))
    yield BreakDriver(engine)
    engine.close()


@pytest.mark.long
def test_a_crowd_is_told_what_one_process_tells_it(tiny_llama: TinyModel) -> None:
    """More sessions than fit on the device: they park, wake, fork, pause, are edited, captured and scored."""
    wanted, _ = CROWD.play(tiny_llama, seed=0)
    told, _ = CROWD.play(replace(tiny_llama, ranks=2), seed=0)
    assert all(map(same, told, wanted))


@pytest.mark.long
def test_scales_of_float8_go_with_the_heads_that_they_belong_to(tiny_llama: TinyModel) -> None:
    said = []
    for ranks in (1, 2):
        engine = replace(tiny_llama, kv_dtype="float8", ranks=ranks).engine(**TIERS)
        driver, start = BreakDriver(engine), prompt(6, 30)
        session = driver.open()
        first = driver.submit(session, start, 5)
        driver.finish(first)
        driver.signal(session, Phase.IO_WAIT)
        assert not driver.place(session).device_bytes
        second = driver.submit(session, [7], 6)
        driver.finish(second)
        assert driver.end(second).usage.tokens_recomputed == 0
        said.append(driver.tokens(first) + driver.tokens(second))
        engine.close()
    assert said[0] == said[1]


def test_ranks_are_told_of_the_blocks_of_every_group_of_layers() -> None:
    batch = make_batch([(9, 1), (0, 6)], [range(9), range(10, 16)], 4, CPU, groups=3)
    hidden = torch.arange(7 * 8.0).view(7, 8)
    run, page = Run.of(0, 2, hidden, batch)
    given, found = run.unpack(page)
    assert torch.equal(given, hidden)
    for one, other in zip(batch.by_group(), found.by_group(), strict=True):
        assert torch.equal(one.slot_blocks, other.slot_blocks)
        assert torch.equal(one.block_tables, other.block_tables)


@pytest.mark.long
def test_layers_with_a_window_are_cut_as_others_are(tmp_path: Path) -> None:
    tiny = make_tiny("two-layers-mixed", tmp_path)
    engine = replace(tiny, ranks=2).engine(**TIERS)
    driver, start = BreakDriver(engine), prompt(6, 50)
    session = driver.open()
    turn = driver.submit(session, start, 5)
    driver.finish(turn)
    driver.signal(session, Phase.IO_WAIT)
    after = driver.submit(session, [7], 6)
    driver.finish(after)
    engine.close()
    assert driver.end(after).usage.tokens_recomputed == 0
    assert driver.tokens(after) == greedy_tokens(tiny.oracle, [*start, *driver.tokens(turn), 7], 6)


def test_parked_and_forked_sessions_compute_nothing_again(two: BreakDriver, tiny_llama: TinyModel) -> None:
    session, child, start = two.open(), SessionId("child"), prompt(1, 30)
    first = two.submit(session, start, 5)
    two.finish(first)
    history = [*start, *two.tokens(first)]
    two.signal(session, Phase.IO_WAIT)
    assert not two.place(session).device_bytes
    two.do(Fork(two.ticket(), session, child))
    turns = [two.submit(each, [7, seed], 6) for seed, each in enumerate((session, child), 3)]
    two.finish(*turns)
    for seed, turn in enumerate(turns, 3):
        assert two.tokens(turn) == greedy_tokens(tiny_llama.oracle, [*history, 7, seed], 6)
        assert two.end(turn).usage.tokens_recomputed == 0


def test_files_do_not_depend_on_the_number_of_ranks(two: BreakDriver, tiny_llama: TinyModel, tmp_path: Path) -> None:
    """From two ranks to one, and back to two."""
    one = BreakDriver(tiny_llama.engine(**TIERS, kv_dir=tmp_path / "one"))
    session, history = two.open(), prompt(2, 30)
    turn = two.submit(session, history, 5)
    two.finish(turn)
    history += two.tokens(turn)
    for here, there, name in ((two, one, "first"), (one, two, "second")):
        path, moved = str(tmp_path / name), SessionId(name)
        here.do(Export(here.ticket(), session, path, "{}"))
        there.do(Import(there.ticket(), moved, path, ""))
        turn = there.submit(moved, [9], 6)
        there.finish(turn)
        assert there.end(turn).usage.cached_tokens == len(history) - 1
        wanted = greedy_tokens(tiny_llama.oracle, [*history, 9], 6)
        assert there.tokens(turn) == wanted
        history, session = [*history, 9, *wanted], moved


def test_memory_is_that_of_all_ranks(two: BreakDriver, tiny_llama: TinyModel) -> None:
    one = tiny_llama.engine(**TIERS)
    assert set(two.engine.info.points) == {*BETWEEN, Point.LOGITS}  # each rank has a part of a layer
    assert replace(two.engine.info, points=one.info.points) == one.info
    session = two.open()
    two.arm(session, tiny_llama.num_layers - 1, action=Action.CAPTURE, point=Point.LOGITS)
    two.finish(turn := two.submit(session, prompt(3, 2 * BLOCK), 1))
    assert [int(tensor_of(each.tensor)[-1].argmax()) for each in two.captures(session).records] == two.tokens(turn)
    assert two.place(session).device_bytes == 2 * BLOCK * one.info.kv_bytes_per_token


@pytest.mark.long
def test_bits_of_a_token_do_not_depend_on_its_company(tiny_llama: TinyModel) -> None:
    settings = Settings(device="cpu", tensor_parallel=2, batch_invariant=True, max_running=16, kv_policy="none")
    driver = BreakDriver(load_engine(tiny_llama.resolved, replace(settings.engine(), max_step_tokens=16, kv_dir=None)))
    alone = driver.turn(driver.open(), prompt(4, 21), 9, REPORTING)
    crowd = [driver.begin(driver.open(), prompt(seed, 11), 20) for seed in range(5, 9)]
    beside = driver.begin(driver.open("another"), prompt(4, 21), 9, REPORTING)
    driver.settle(beside, *crowd)
    found, wanted = ([each.logprobs for each in turn.said if isinstance(each, Token)] for turn in (beside, alone))
    assert found == wanted
    driver.engine.close()


@pytest.mark.parametrize(
    ("param", "changed"),
    [
        ("weights_device", {"weights_device": 1 << 20}),
        ("cuda_graphs", {"cuda_graphs": True}),
        ("tensor_parallel", {"tensor_parallel": 3}),
    ],
)
def test_what_ranks_are_not_for_is_refused(tiny_llama: TinyModel, param: str, changed: dict[str, Any]) -> None:
    settings = Settings(device="cpu", state_dir=None, **{"tensor_parallel": 2, **changed})
    with pytest.raises(FieldOutOfRange) as refused:
        load_engine(tiny_llama.resolved, settings.engine())
    assert refused.value.param == param
    assert param in refused.value.message
