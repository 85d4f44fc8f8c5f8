"""Models whose layers fold tokens into a state: whatever becomes of a session, its tokens are those of Transformers."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from app.domain.breakpoints import Action, Edit, EditOp, Gate
from app.domain.errors import FieldOutOfRange
from app.domain.values import KVBudget, KVPolicy, Phase, SessionId, StopRule, Tier
from app.gpu.startup.loader import load_engine
from app.messages import Export, Import, Open, Rewind, TurnFinished
from app.model_store.resolve import ResolvedModel, resolve
from tests.durability.restarting import open_session
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.breakpoints.breaking_oracle import data_of
from tests.gpu.commands.test_transfers import ID, move
from tests.gpu.driving import BLOCK, cpu_settings
from tests.gpu.models.oracle import BY_ROWS, FOLDING, VOCAB, build_model, save_model, tiny_config
from tests.serving import serve

CONTEXTS = 3
"""So many sessions of `LONGEST` tokens fit on the device, and as many on the host."""
LONGEST = 64


class Served:
    """A tiny model, and what Transformers generates with it."""

    def __init__(self, case: str, folder: Path, **changed: Any) -> None:
        config = tiny_config(case)
        config.update(changed)
        self._oracle = build_model(config)
        self.model: ResolvedModel = resolve(str(save_model(self._oracle, folder)), cache_dir=folder)
        probe = self.make(contexts=100)
        pool = probe.scheduler.cache.pool
        self.context_bytes = probe.placement.tiers.block_bytes * (pool.blocks_for(LONGEST) + pool.state_blocks)

    @torch.inference_mode()
    def greedy(self, context: tuple[int, ...], count: int) -> list[int]:
        tokens = list(context)
        for _ in range(count):
            logits = self._oracle(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        return tokens[len(context) :]

    def make(
        self, folder: Path | None = None, contexts: int = CONTEXTS, state_every: int | None = 2 * BLOCK, **changed: Any
    ) -> BreakDriver:
        """An engine with room for so many contexts on the device, and as many on the host."""
        room = KVBudget(bytes=contexts * getattr(self, "context_bytes", 1 << 20))
        settings = {"kv_policy": KVPolicy.SIGNAL, "max_step_tokens": 16, "kv_device": room, "kv_host": room, **changed}
        driver = BreakDriver(load_engine(self.model, cpu_settings(kv_dir=folder, **settings)))
        if state_every is not None:
            driver.scheduler.cache.state_every = state_every
        return driver


OFTEN = ("qwen3_next", "falcon_h1, both in a layer", "mamba2")
"""One of each kind: layers that fold beside others that attend, both in each layer, and no attention."""


@pytest.fixture(scope="module", params=OFTEN)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served("qwen3_next", tmp_path_factory.mktemp("model"))


def prompt(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(3, VOCAB) for _ in range(length)]


IN_PARTS = "doge, masks made of values"
"""Beyond its window, Transformers' own module gives other numbers for a text in parts than for all of it at once."""


class Life:
    """Sessions that talk, wait, pause, go back and fork, in any order."""

    def __init__(self, served: Served, driver: BreakDriver, seed: int) -> None:
        self.served, self.driver, self.chance = served, driver, random.Random(seed)
        self.system = prompt(self.chance, 4 * BLOCK)
        self.histories = {self.driver.open(): list[int]()}

    def live(self, steps: int) -> None:
        for _ in range(steps):
            ways: list[Callable[[SessionId], None]] = [self.begin, self.talk, self.talk, self.pause, self.pause]
            ways += [self.wait, self.go_back, self.fork]
            self.chance.choice(ways)(self.chance.choice(list(self.histories)))
            self.driver.check()

    def begin(self, closing: SessionId) -> None:
        self.histories[self.driver.open()] = []
        if len(self.histories) > 2 * CONTEXTS:
            self.driver.close(closing)
            del self.histories[closing]

    def say(self, session: SessionId) -> Turn:
        """Begin a turn; many sessions begin alike."""
        if len(self.histories[session]) > LONGEST - 18:
            self.go_back(session)
        history, new = self.histories[session], prompt(self.chance, self.chance.randint(1, 12))
        new = [*self.system, *new] if not history and self.chance.random() < 0.7 else new
        history.extend(new)
        return self.driver.begin(session, new, min(LONGEST - len(history), self.chance.randint(1, 6)))

    def end(self, turn: Turn) -> None:
        history = self.histories[turn.session]
        assert turn.tokens == self.served.greedy(tuple(history), len(turn.tokens))
        history.extend(turn.tokens)

    def talk(self, *unwilling: SessionId) -> None:
        """All at once, but for one if there are others."""
        turns = [self.say(each) for each in self.histories if each not in unwilling]
        self.driver.settle(*turns)
        for turn in turns:
            self.end(turn)

    def pause(self, session: SessionId) -> None:
        """A turn that pauses at a layer of each pass, with others' turns, moves or its end between."""
        always = Gate(data_of(torch.zeros(self.driver.runner.stack.hidden_size)), below=1.0)  # the pass runs again
        self.driver.arm(session, self.chance.randrange(3), gate=self.chance.choice([None, always]))
        turn, history = self.say(session), self.histories[session]
        self.driver.settle(turn)
        while turn.paused and (what := self.chance.random()) < 0.9:
            if what < 0.3:
                self.driver.signal(session, Phase.IO_WAIT)
            if 0.2 < what < 0.4:
                self.talk(session)
            self.driver.go_on(turn)
        if turn.paused:
            history += turn.tokens[: self.driver.cancel(turn, len(turn.tokens) // 2) - len(history)]
        else:
            self.end(turn)
        self.driver.disarm(session)

    def wait(self, session: SessionId) -> None:
        self.driver.signal(session, self.chance.choice([Phase.IO_WAIT, Phase.IDLE]))
        if self.chance.random() < 0.5:
            self.driver.signal(session, Phase.READY)

    def go_back(self, session: SessionId) -> None:
        keep = self.chance.randint(0, len(self.histories[session]) // 2)
        self.driver.do(Rewind(self.driver.ticket(), session, keep))
        del self.histories[session][keep:]

    def fork(self, parent: SessionId) -> None:
        self.histories[self.driver.fork_idle(parent)] = list(self.histories[parent])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
@torch.inference_mode()
def test_tokens_are_those_of_transformers_whatever_becomes_of_a_session(
    served: Served, seed: int, tmp_path: Path
) -> None:
    Life(served, served.make(tmp_path), seed).live(15)


@pytest.mark.parametrize(
    "case",
    [
        "bloom",
        "gemma3n, several streams",
        *(pytest.param(case, marks=pytest.mark.long) for case in BY_ROWS if case not in ("bloom", IN_PARTS)),
        *(pytest.param(case, marks=pytest.mark.long) for case in FOLDING if case not in OFTEN),
        pytest.param("gemma4, embeddings of each layer", marks=pytest.mark.long),
    ],
)
@torch.inference_mode()
def test_so_they_are_of_other_families_and_of_modules_that_attend_by_themselves(case: str, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    served = Served(case, tmp_path)
    Life(served, served.make(tmp_path / "kv"), 0).live(15)


def talk(
    served: Served, driver: BreakDriver, session: SessionId, history: list[int], new: list[int], count: int = 5
) -> TurnFinished:
    """A turn of `count` tokens, which are those of Transformers, and how it ended."""
    turn = driver.turn(session, new, count)
    history += new
    assert turn.tokens == served.greedy(tuple(history), count)
    history += turn.tokens
    return turn.end


@torch.inference_mode()
def test_a_state_comes_back_from_the_host_the_disk_and_a_restart_as_it_left(served: Served, tmp_path: Path) -> None:
    driver, history, chance = served.make(tmp_path), list[int](), random.Random(1)
    session = driver.open()
    talk(served, driver, session, history, prompt(chance, 21))
    pool, sequence = driver.runner.pool, driver.sequence(session)
    before = pool.read_states(torch.tensor([sequence.blocks[-pool.state_blocks :]]))
    for phase, tier in ((Phase.IO_WAIT, Tier.HOST), (Phase.IDLE, Tier.DISK)):
        driver.signal(session, phase)
        assert sequence.tier is tier
        driver.signal(session, Phase.READY)
        assert torch.equal(pool.read_states(torch.tensor([sequence.blocks[-pool.state_blocks :]])), before)
    driver.signal(session, Phase.IDLE)
    for cut in (0, 3):
        again, kept = served.make(tmp_path), history[: len(history) - cut]
        again.do(Open(again.ticket(), session, token_ids=tuple(kept)))
        ended = talk(served, again, session, kept, prompt(chance, 7))
        assert ended.usage.cached_tokens == (0 if cut else len(history) - 1)
    again.signal(session, Phase.IDLE)
    again.signal(session, Phase.READY)
    del kept[-3:]
    again.do(Rewind(again.ticket(), session, len(kept)))  # the file has a state of more tokens
    again.signal(session, Phase.IDLE)
    talk(served, again, session, kept, prompt(chance, 2))


@torch.inference_mode()
def test_a_pause_after_any_layer_changes_no_token_of_any_row(served: Served) -> None:
    driver, chance = served.make(contexts=8), random.Random(7)
    for layer in range(3):
        prompts = [prompt(chance, length) for length in (18, 9, 1)]
        turns = [driver.begin(driver.open(), new, 5) for new in prompts[1:]]
        turns.append(driver.begin(driver.open_armed(layer), prompts[0], 5))
        driver.run_together(turns, chance)
        for turn, new in zip(turns, [*prompts[1:], prompts[0]], strict=True):
            assert turn.tokens == served.greedy(tuple(new), 5)
        paths = [row.path for plan in driver.plans for row in plan.rows if row.turn.ticket in turns[-1].tickets]
        assert all(path.lo == layer + 1 for path in paths if not path.pauses), "a pass goes on where it has paused"


@torch.inference_mode()
def test_a_token_that_ends_a_turn_is_not_in_its_state(hybrid: Served) -> None:
    """Nor would it be if the device had the next step by then."""
    driver, new = hybrid.make(), prompt(random.Random(9), 9)
    expected = hybrid.greedy(tuple(new), 5)
    last = next(token for token in expected[1:] if token != expected[0])
    expected = expected[: expected.index(last) + 1]
    turn = driver.begin(driver.open(), new, 9, stop=StopRule(9, stop_token_ids=frozenset({last})))
    while not turn.rests:
        if driver.engine._step is None:
            driver.take(driver.engine.launch())
        for part in (driver.engine.overlap, driver.engine.collect):
            driver.take(part())
    assert turn.tokens == expected
    talk(hybrid, driver, turn.session, [*new, *expected], prompt(random.Random(10), 3))


@torch.inference_mode()
def test_a_state_goes_with_a_session_to_another_server_and_to_a_file(served: Served, tmp_path: Path) -> None:
    for folder in ("here", "there", "third"):
        (tmp_path / folder).mkdir()
    here, there, third = (served.make(tmp_path / folder) for folder in ("here", "there", "third"))
    history, chance = list[int](), random.Random(2)
    here.open("t", ID)
    talk(served, here, ID, history, prompt(chance, 18))
    _, received = move(here, there, history)
    assert received == len(history) - 1
    here.do(Export(here.ticket(), ID, str(tmp_path / "session")))
    third.do(Import(third.ticket(), ID, str(tmp_path / "session")))
    new = prompt(chance, 3)
    for driver in (there, third):
        assert talk(served, driver, ID, list(history), new).usage.cached_tokens == len(history) - 1


@torch.inference_mode()
def test_a_rewind_recomputes_from_the_end_of_the_turn_before_at_most(served: Served) -> None:
    driver, history, chance = served.make(), list[int](), random.Random(3)
    session = driver.open()
    for length in (14, 9):
        talk(served, driver, session, history, prompt(chance, length))
    for keep in (14 + 5 + 4, 14 + 5):
        del history[keep:]
        driver.do(Rewind(driver.ticket(), session, keep))
        ended = talk(served, driver, session, history, prompt(chance, 2))
        assert ended.usage.cached_tokens == 14 + 5 - 1


@torch.inference_mode()
def test_a_prefix_is_found_where_a_state_was_kept_and_nobody_elses_is(served: Served) -> None:
    driver, chance = served.make(contexts=8), random.Random(4)
    system = prompt(chance, 6 * BLOCK)

    def cached(tenant: str, *, steered: bool = False) -> int:
        session, new = driver.open(tenant), [*system, *prompt(chance, 3)]
        if steered:
            driver.arm(session, 1, action=Action.EDIT, edits=(Edit(EditOp.SCALE, 1.5),))
            return driver.turn(session, new, 5).end.usage.cached_tokens
        return talk(served, driver, session, [], new).usage.cached_tokens

    assert cached("a", steered=True) == 0
    assert [cached("a"), cached("a"), cached("b")] == [0, 6 * BLOCK, 0]
    assert cached("a", steered=True) == 6 * BLOCK, "what was computed with the same edits"


@torch.inference_mode()
def test_sessions_compute_a_long_prefix_once(tmp_path: Path) -> None:
    served, chance = Served("qwen3_next", tmp_path, max_position_embeddings=4096), random.Random(11)
    driver = served.make(state_every=None, max_step_tokens=256, contexts=100)
    far = driver.scheduler.cache.state_every
    for shared, own, ends, most in (2000, 9, (2000,), [0]), (1990, 80, (), [79]), (2000, 500, (), [far, far // 4]):
        system = prompt(chance, shared)
        for recomputed in (shared, *most):
            turn = driver.turn(driver.open(), new := [*system, *prompt(chance, own)], 1, prefix_ends=ends)
            assert turn.tokens == served.greedy(tuple(new), 1)
            assert shared - turn.end.usage.cached_tokens <= recomputed


@torch.inference_mode()
def test_a_prefix_with_more_hashes_than_a_state_has_blocks_is_found(tmp_path: Path) -> None:
    served, chance = Served("mamba2", tmp_path), random.Random(6)
    driver = served.make(contexts=8)
    system = prompt(chance, (driver.scheduler.cache.pool.state_blocks + 9) * BLOCK)
    for cached in (0, len(system) // 16 * 16):
        session, history = driver.open(), list[int]()
        assert talk(served, driver, session, history, [*system, *prompt(chance, 3)]).usage.cached_tokens == cached
        talk(served, driver, session, history, prompt(chance, 2))


@torch.inference_mode()
def test_a_step_that_does_not_fit_changes_no_token(served: Served) -> None:
    """Also if memory runs out after layers have folded in place."""
    chance = random.Random(5)

    def short_of_memory(unfit: range) -> BreakDriver:
        driver = served.make(contexts=6)
        stack: Any = driver.runner.stack
        run = stack.layer

        def layer(index: int, hidden: torch.Tensor, *given: Any) -> torch.Tensor:
            if index and len(hidden) in unfit:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            found: torch.Tensor = run(index, hidden, *given)
            return found

        stack.layer = layer
        return driver

    driver = short_of_memory(range(6, 99))
    for each in (14, 9):
        talk(served, driver, driver.open(), [], prompt(chance, each))
    turn = driver.turn(driver.open_armed(1, once=True), new := prompt(chance, 12), 5)
    driver.run(turn)  # one part of the pass goes on from what the one before has left half way up
    assert turn.tokens == served.greedy(tuple(new), 5)
    driver, prompts = short_of_memory(range(2, 3)), [prompt(chance, 5) for _ in range(2)]
    turns = [driver.begin(driver.open(), new, 5) for new in prompts]
    driver.settle(*turns)
    assert [turn.tokens for turn in turns] == [served.greedy(tuple(new), 5) for new in prompts]


@torch.inference_mode()
def test_a_device_without_room_for_a_state_is_refused(hybrid: Served) -> None:
    with pytest.raises(FieldOutOfRange, match=r"must hold a session's state of .* bytes"):
        hybrid.make(kv_device=KVBudget(bytes=4096))


def test_prompts_that_begin_alike_compute_that_once_whoever_asks() -> None:
    def cached(alike: str, asked: str, way: int) -> int:
        user, system = {"role": "user", "content": asked}, {"role": "system", "content": alike}
        document = {"type": "text", "text": alike, "cache_control": {"type": "ephemeral"}}
        path, body = (
            ("chat/completions", {"messages": [system, user], "max_tokens": 2}),
            ("responses", {"instructions": alike, "input": asked, "max_output_tokens": 2}),
            ("messages", {"system": alike, "messages": [user], "max_tokens": 2}),
            ("messages", {"messages": [{**user, "content": [document]}, user], "max_tokens": 2}),
            (f"sessions/{session}/generate", {"messages": [system, user], "max_tokens": 2}),
            ("completions", {"prompt": alike + asked, "max_tokens": 2}),
        )[way]
        answer = http.post(f"/v1/{path}", json=body if way == 4 else {**body, "model": "tiny-hybrid"})
        assert "cache_control" not in answer.raise_for_status().headers.get("x-djinn-ignored", "")
        usage = answer.json()["usage"]
        usage = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
        return int(usage["cache_read_input_tokens" if path == "messages" else "cached_tokens"])

    with serve(model="random:tiny-hybrid", max_model_len=None) as url, httpx.Client(base_url=url) as http:
        for way in range(6):
            session = open_session(http)
            assert cached("abcdef"[way] * 2000, "Why?", way) == 0
            session = open_session(http)
            assert cached("abcdef"[way] * 2000, "How?", way) > 2000 - 16
        estimate = http.get("/v1/memory/estimate", params={"tokens": 16}).json()
        assert estimate["kv_bytes"] > 16 * estimate["kv_bytes_per_token"], "its state is counted"
