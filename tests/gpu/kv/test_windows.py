"""Models all of whose layers have a window: a session holds the KV of that, and no more, wherever it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from app.domain.errors import FieldOutOfRange
from app.domain.memory_map import SessionMemory
from app.domain.values import KVPolicy, Phase, SessionId, Ticket, Tier
from app.gpu.state.layer_state import FoldState, SharedState, TokenState, WindowState, window_of
from app.gpu.state.moves import MoveKind
from app.gpu.state.sequence import TokenSequence
from app.messages import Export, Import
from app.model_store.resolve import ResolvedModel, resolve
from app.wire.memory import MemoryEstimate
from tests.gpu.driving import Driver
from tests.gpu.kv.tiering import Bench
from tests.gpu.oracle import greedy_tokens
from tests.gpu.tiny_engine import BLOCK as SMALL_BLOCK
from tests.gpu.tiny_engine import make_engine, oracle, prompt

__all__ = ["oracle"]

WINDOW, BLOCK = 512, 16
MOST_BLOCKS = WINDOW // BLOCK + 1
BLOCK_BYTES = BLOCK * 2 * 2 * 2 * 16 * 4
"""Of two layers, keys and values, two heads of 16 numbers in float32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ResolvedModel:
    """A tiny Mistral."""
    folder = tmp_path_factory.mktemp("mistral")
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16384}
    config = AutoConfig.for_model("mistral", **sizes, **heads, sliding_window=WINDOW)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return resolve(str(folder), cache_dir=folder)


@pytest.fixture
def make_driver(model: ResolvedModel, tmp_path: Path) -> Callable[[int], Driver]:
    """Of an engine with so many blocks on the device."""

    def make(blocks: int) -> Driver:
        of_both = [count * BLOCK // SMALL_BLOCK for count in (blocks, 80)]
        engine = make_engine(model, of_both[0], 256, of_both[1], KVPolicy.SIGNAL, tmp_path / "kv", block_size=BLOCK)
        return Driver(engine)

    return make


def evict_all(driver: Driver) -> None:
    """What no session holds is found in memory no more."""
    cache = driver.scheduler.cache
    for pool in (cache.pool, cache.host):
        pool.release(pool.allocate(pool.available))


@pytest.mark.parametrize("tokens", [3000, pytest.param(8000, marks=pytest.mark.long)])
def test_thousands_of_tokens_take_the_room_of_a_window_in_every_tier(
    make_driver: Callable[[int], Driver], oracle: Any, tokens: int
) -> None:
    driver = make_driver(60)  # for 960 tokens, were all of them kept
    session, history, turns = driver.open(), list[int](), list[Ticket]()
    most = MOST_BLOCKS * BLOCK_BYTES

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
    estimate = MemoryEstimate.of(memory, tokens, None)
    assert (estimate.kv_bytes, estimate.sessions_resident) == (most, 60 // MOST_BLOCKS)


def test_a_device_holds_as_many_sessions_as_windows_fit(make_driver: Callable[[int], Driver], oracle: Any) -> None:
    """Three of 1,500 tokens on a device for one and a half, were all kept: they take turns and recompute nothing."""
    driver = make_driver(150)
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
    driver, tokens = make_driver(80), prompt(0, 2000)
    driver.generate(tokens, 1)
    session = driver.open()
    turn = driver.answer(session, [*tokens, 1, 2], 4)
    assert driver.end(turn).usage.cached_tokens == 2000
    assert driver.tokens(turn) == greedy_tokens(oracle, [*tokens, 1, 2], 4)
    driver.check()


def test_an_export_has_the_window_and_comes_back_as_a_session(
    make_driver: Callable[[int], Driver], oracle: Any, tmp_path: Path
) -> None:
    driver, tokens, path = make_driver(80), prompt(0, 2000), str(tmp_path / "export")
    session = driver.open()
    turn = driver.answer(session, tokens, 4)
    driver.do(Export(driver.ticket(), session, path))
    assert Path(path).stat().st_size < (MOST_BLOCKS + 1) * BLOCK_BYTES + 12000
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


def test_what_layers_keep_together_is_what_the_longest_memory_needs() -> None:
    near, far = WindowState(64, 100), WindowState(64, 512)
    assert window_of([near, far, near]) == 512
    assert window_of([near, TokenState(64)]) is None
    assert window_of([near, SharedState(0)]) == 100, "it has no memory of its own"
    for folding in (FoldState(64), FoldState(64, near)):  # what has left a window cannot be gone back to
        assert window_of([near, folding]) is None
    for other in (TokenState(32), FoldState(64, TokenState(32))):
        with pytest.raises(FieldOutOfRange, match="equally many numbers"):
            window_of([near, other])
