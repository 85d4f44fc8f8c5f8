"""Models with windows: of layers that have one a session holds the KV of that, and no more, wherever it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.domain.memory_map import SessionMemory
from app.domain.values import KVPolicy, Phase, SessionId, Ticket, Tier
from app.gpu.state.moves import MoveKind
from app.gpu.state.sequence import TokenSequence
from app.messages import Export, Import, Rewind
from app.model_store.resolve import ResolvedModel
from app.wire.memory import MemoryEstimate
from tests.gpu.driving import Driver
from tests.gpu.kv.tiering import Bench
from tests.gpu.tiny_engine import BLOCK as SMALL_BLOCK
from tests.gpu.tiny_engine import FULL, SLIDING, greedy_tokens, make_engine, make_windowed, oracle, prompt

__all__ = ["oracle"]

WINDOW, BLOCK = 512, 16
MOST_BLOCKS = WINDOW // BLOCK + 1
LAYER_BYTES = BLOCK * 2 * 2 * 16 * 4
"""Of a block, keys and values, two heads of 16 numbers in float32."""
MODELS = {"mistral": [SLIDING, SLIDING], "qwen3": [SLIDING, FULL, SLIDING], "gemma2": [SLIDING, FULL]}
"""The types of their layers. The last is run by its own modules."""


@pytest.fixture(scope="module", params=["mistral", "qwen3"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> ResolvedModel:
    """A tiny one."""
    return make_windowed(tmp_path_factory.mktemp(request.param), request.param, MODELS[request.param], WINDOW)


def kept_bytes(model: ResolvedModel, tokens: int, windows: int = MOST_BLOCKS) -> int:
    """All tokens of layers without a window, and so many blocks of the others."""
    types: list[str] = model.config.layer_types
    return LAYER_BYTES * (types.count(FULL) * -(-tokens // BLOCK) + types.count(SLIDING) * windows)


@pytest.fixture
def make_driver(model: ResolvedModel, tmp_path: Path) -> Callable[[int], Driver]:
    """Of an engine with room for all layers of so many blocks on the device."""

    def make(blocks: int) -> Driver:
        of_both = [count * BLOCK // SMALL_BLOCK for count in (blocks, blocks + 20)]
        engine = make_engine(model, of_both[0], 256, of_both[1], KVPolicy.SIGNAL, tmp_path / "kv", block_size=BLOCK)
        return Driver(engine)

    return make


def evict_all(driver: Driver) -> None:
    """What no session holds is found in memory no more."""
    cache = driver.scheduler.cache
    for pool in (cache.pool, cache.host):
        pool.release(pool.allocate(pool.available))


@pytest.mark.parametrize(
    ("model", "tokens"),
    [
        ("mistral", 3000),
        ("qwen3", 3000),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (("mistral", 8000), ("qwen3", 8000), ("gemma2", 3000))
        ),
    ],
    indirect=["model"],
)
def test_thousands_of_tokens_take_the_room_of_a_window_in_every_tier(
    model: ResolvedModel, make_driver: Callable[[int], Driver], oracle: Any, tokens: int
) -> None:
    layers, most = model.config.num_hidden_layers, kept_bytes(model, tokens + 84)
    room = kept_bytes(model, tokens + 84, MOST_BLOCKS + 256 // BLOCK) // (layers * LAYER_BYTES) + 1
    assert room * BLOCK < 0.7 * tokens, "for so many, were all of them kept"
    driver = make_driver(room)
    session, history, turns = driver.open(), list[int](), list[Ticket]()

    def answer(new: list[int]) -> SessionMemory:
        turns.append(driver.answer(session, new, 8))
        history.extend([*new, *driver.tokens(turns[-1])])
        assert history[-8:] == greedy_tokens(oracle, history[:-8], 8)
        driver.check()
        return driver.place(session)

    place = answer(prompt(0, tokens))
    assert (place.tier, place.computed_tokens) == (Tier.DEVICE, tokens + 7)
    assert 0 < place.device_bytes <= most
    assert place.host_bytes <= most
    for phase, tier in ((Phase.IO_WAIT, Tier.HOST), (Phase.IDLE, Tier.DISK)):
        driver.signal(session, phase)
        place = driver.place(session)
        held = {Tier.HOST: place.host_bytes, Tier.DISK: place.disk_bytes}
        assert place.tier is tier
        assert held == {**dict.fromkeys(held, 0), tier: held[tier]}
        assert 0 < held[tier] <= most
        evict_all(driver)
        place = answer(prompt(len(history), 20))
        assert driver.end(turns[-1]).usage.tokens_recomputed == 0
    memory = driver.memory()
    assert memory.device.owned_bytes <= most
    estimate, kept = MemoryEstimate.of(memory, tokens, None), kept_bytes(model, tokens)
    assert (estimate.kv_bytes, estimate.sessions_resident) == (kept, memory.device.total_bytes // kept)
    assert estimate.kv_bytes_per_token == layers * LAYER_BYTES // BLOCK


def test_a_device_holds_as_many_sessions_as_windows_fit(make_driver: Callable[[int], Driver], oracle: Any) -> None:
    """Three of 1,500 tokens on a device for less than two, were all kept: they take turns and recompute nothing."""
    driver = make_driver(200 if FULL in oracle.config.layer_types else 150)
    sessions = [driver.open() for _ in range(3)]
    prompts = [prompt(seed, 1500) for seed in range(3)]
    turns = [driver.submit(session, tokens, 5) for session, tokens in zip(sessions, prompts, strict=True)]
    driver.finish(*turns)
    for session, turn, tokens in zip(sessions, turns, prompts, strict=True):
        assert driver.tokens(turn) == greedy_tokens(oracle, tokens, 5)
        assert driver.place(session).tier is Tier.DEVICE
        assert driver.end(turn).usage.tokens_recomputed == 0
    driver.check()


def test_a_prompt_that_another_session_has_had_needs_the_end_of_it_only(
    make_driver: Callable[[int], Driver], oracle: Any
) -> None:
    driver, tokens = make_driver(160), prompt(0, 2000)
    driver.generate(tokens, 1)
    session = driver.open()
    turn = driver.answer(session, [*tokens, 1, 2], 4)
    assert driver.end(turn).usage.cached_tokens == 2000
    assert driver.tokens(turn) == greedy_tokens(oracle, [*tokens, 1, 2], 4)
    driver.check()


@pytest.mark.parametrize("evicted", [False, True])
def test_a_rewind_behind_the_window_finds_what_is_cached_and_recomputes_the_rest(
    make_driver: Callable[[int], Driver], oracle: Any, *, evicted: bool
) -> None:
    driver, tokens = make_driver(160), prompt(0, 1500)
    session = driver.open()
    driver.answer(session, tokens, 4)
    fork = driver.fork_idle(session)
    history = list(driver.sequence(session).tokens)
    if evicted:
        evict_all(driver)
    driver.do(Rewind(driver.ticket(), session, 900))
    for each, kept in ((session, history[:900]), (fork, history)):
        turn = driver.answer(each, [7, 8], 4)
        assert driver.tokens(turn) == greedy_tokens(oracle, [*kept, 7, 8], 4)
        expected = (0 if evicted else 896) if each == session else len(history) - 1
        assert driver.end(turn).usage.cached_tokens == expected
        driver.check()


def test_an_export_has_the_window_and_comes_back_as_a_session(
    model: ResolvedModel, make_driver: Callable[[int], Driver], oracle: Any, tmp_path: Path
) -> None:
    driver, tokens, path = make_driver(160), prompt(0, 2000), str(tmp_path / "export")
    session = driver.open()
    turn = driver.answer(session, tokens, 4)
    driver.do(Export(driver.ticket(), session, path))
    assert Path(path).stat().st_size < kept_bytes(model, 2004) + 12000
    copy = SessionId("copy")
    driver.do(Import(driver.ticket(), copy, path, namespace="copy"))
    history = [*tokens, *driver.tokens(turn)]
    assert driver.place(copy).tier is Tier.DISK
    turn = driver.answer(copy, [5], 4)
    assert driver.tokens(turn) == greedy_tokens(oracle, [*history, 5], 4)
    assert driver.end(turn).usage.tokens_recomputed == 0
    driver.check()


@pytest.mark.parametrize(
    ("computed", "blocks", "behind", "held"),
    [
        (40, 10, 0, 2),  # an older server has written all
        (40, 2, 8, 2),
        (39, 2, 8, 2),
        (38, 2, 8, None),  # the next token sees more
        (40, 1, 9, None),
        (20, 2, 8, None),  # the history has differed from there on
    ],
)
def test_a_file_is_taken_if_it_has_what_the_next_token_sees(
    computed: int, blocks: int, behind: int, held: int | None
) -> None:
    bench = Bench(window=8)
    sequence = TokenSequence(SessionId("old"), b"", tokens=[7] * 41)
    bench.placement.adopt(sequence, computed, blocks, behind)
    bench.placement.end_turn(sequence)
    assert sequence.tier is (None if held is None else Tier.DISK)
    if held is None:
        assert [move.kind for move in bench.finish()] == [MoveKind.DELETE]
        return
    bench.load(sequence)
    bench.restore(sequence)
    assert (len(sequence.copies), len(sequence.held)) == (held, held)
    assert sequence.computed == computed
    bench.host.check_integrity([sequence.copies])
