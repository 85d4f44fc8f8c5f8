"""Models whose layers fold tokens into a state: whatever becomes of a session, its tokens are those of Transformers."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from app.domain.breakpoints import Until
from app.domain.values import KVBudget, KVPolicy, Phase, SessionId
from app.gpu.startup.loader import load_engine
from app.messages import Rewind
from app.model_store.resolve import ResolvedModel, resolve
from tests.gpu.breakpoints.breaking import BreakDriver, Turn
from tests.gpu.driving import BLOCK, cpu_settings
from tests.gpu.models.oracle import FOLDING, VOCAB, build_model, save_model, tiny_config

LAYERS = 3
CONTEXTS = 3
"""So many sessions of `LONGEST` tokens fit on the device, and as many on the host."""
LONGEST = 64


class Served:
    """A tiny model, and what Transformers generates with it."""

    def __init__(self, case: str, folder: Path) -> None:
        self._oracle = build_model(tiny_config(case))
        self.model: ResolvedModel = resolve(str(save_model(self._oracle, folder)), cache_dir=folder)
        self.greedy = cache(self._greedy)
        probe = self.make(contexts=100)
        pool = probe.scheduler.cache.pool
        self.context_bytes = probe.placement.tiers.block_bytes * (pool.blocks_for(LONGEST) + pool.state_blocks)

    @torch.inference_mode()
    def _greedy(self, context: tuple[int, ...], count: int) -> list[int]:
        tokens = list(context)
        for _ in range(count):
            logits = self._oracle(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        return tokens[len(context) :]

    def make(self, folder: Path | None = None, contexts: int = CONTEXTS, **changed: Any) -> BreakDriver:
        """An engine with room for so many contexts on the device, and as many on the host."""
        room = KVBudget(bytes=contexts * getattr(self, "context_bytes", 1 << 20))
        settings = {"kv_policy": KVPolicy.SIGNAL, "max_step_tokens": 16, "kv_dir": folder, **changed}
        driver = BreakDriver(load_engine(self.model, cpu_settings(kv_device=room, kv_host=room, **settings)))
        driver.scheduler.cache.state_every = 2 * BLOCK
        return driver


@pytest.fixture(scope="module", params=FOLDING)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served("qwen3_next", tmp_path_factory.mktemp("model"))


def prompt(chance: random.Random, length: int) -> list[int]:
    return [chance.randrange(3, VOCAB) for _ in range(length)]


class Life:
    """Sessions that talk, wait, pause, go back and fork, in any order."""

    def __init__(self, served: Served, driver: BreakDriver, seed: int) -> None:
        self.served, self.driver, self.chance = served, driver, random.Random(seed)
        self.histories: dict[SessionId, list[int]] = {}
        self.system = prompt(self.chance, 4 * BLOCK)
        """What many of them begin with."""

    def live(self, steps: int) -> None:
        for _ in range(steps):
            ways = [self.begin, self.talk, self.talk_together, self.pause, self.wait, self.go_back, self.fork]
            self.chance.choice(ways if self.histories else ways[:1])()
            self.driver.check()

    def any(self) -> SessionId:
        return self.chance.choice(list(self.histories))

    def begin(self) -> None:
        if len(self.histories) > 2 * CONTEXTS:
            closing = self.any()
            self.driver.close(closing)
            del self.histories[closing]
        self.histories[self.driver.open()] = []

    def say(self, session: SessionId, most: int = 20) -> Turn:
        """Begin a turn, now and then after a part of the history only."""
        history, new = self.histories[session], prompt(self.chance, self.chance.randint(1, most))
        if not history and self.chance.random() < 0.7:
            new = [*self.system, *new]
        if len(history) + len(new) + 6 > LONGEST:
            self.driver.close(session)
            del self.histories[session]
            session = self.driver.open()
            history = self.histories[session] = []
        turn = self.driver.begin(session, new, self.chance.randint(1, 6))
        history.extend(new)
        return turn

    def end(self, turn: Turn) -> None:
        history = self.histories[turn.session]
        assert turn.tokens == self.served.greedy(tuple(history), len(turn.tokens))
        history.extend(turn.tokens)

    def talk(self) -> None:
        turn = self.say(self.any())
        self.driver.settle(turn)
        self.end(turn)

    def talk_together(self) -> None:
        count = self.chance.randint(1, len(self.histories))
        turns = [self.say(each) for each in self.chance.sample(list(self.histories), count)]
        self.driver.settle(*turns)
        for turn in turns:
            self.end(turn)

    def pause(self) -> None:
        """A turn that pauses at a layer of each pass, with others' turns, moves and forks between."""
        session = self.any()
        made = self.driver.arm(session, self.chance.randrange(LAYERS))
        turn = self.say(session, most=6)
        self.driver.settle(turn)
        while turn.paused:
            if self.chance.random() < 0.3:
                self.driver.signal(turn.session, Phase.IO_WAIT)
            others = [each for each in self.histories if each not in (turn.session, session)]
            if others and self.chance.random() < 0.3:
                other = self.say(self.chance.choice(others))
                self.driver.settle(other)
                self.end(other)
            what = self.chance.random()
            if what < 0.1:
                twin = self.driver.fork(turn)
                self.histories[twin.session] = list(self.histories[turn.session])
                self.driver.go_on(twin, Until(end=True))
                self.end(twin)
                self.driver.disarm(twin.session)
            if what > 0.9:
                history = self.histories[turn.session]
                kept = self.chance.randint(0, len(turn.tokens))
                history += turn.tokens[:kept]
                assert self.driver.cancel(turn, kept) == len(history)
                break
            self.driver.go_on(turn)
        else:
            self.end(turn)
        if turn.session == session:
            self.driver.disarm(session, made)

    def wait(self) -> None:
        session = self.any()
        self.driver.signal(session, self.chance.choice([Phase.IO_WAIT, Phase.IDLE]))
        if self.chance.random() < 0.5:
            self.driver.signal(session, Phase.READY)

    def go_back(self) -> None:
        session = self.any()
        history = self.histories[session]
        keep = self.chance.randint(0, len(history))
        self.driver.do(Rewind(self.driver.ticket(), session, keep))
        del history[keep:]

    def fork(self) -> None:
        parent = self.any()
        child = self.driver.fork_idle(parent)
        self.histories[child] = list(self.histories[parent])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 12))])
@torch.inference_mode()
def test_tokens_are_those_of_transformers_whatever_becomes_of_a_session(
    served: Served, seed: int, tmp_path: Path
) -> None:
    Life(served, served.make(tmp_path), seed).live(30)
