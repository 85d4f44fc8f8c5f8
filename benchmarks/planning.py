"""What planning costs with many sessions: `python -m benchmarks.planning`. No model runs.

Ten thousand sessions take turns on a device for a few hundred. The clock is simulated; each move ends with the step
after it. So the times are those of planning alone: `plan` chooses a step's rows, `tick` goes on with prefetches and
parks, `signal` is one client's word that its session waits.
"""

import argparse
import gc
import itertools
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from app.domain.values import KVPolicy, Phase, SamplingParams, SessionId, StopRule, Ticket
from app.gpu.kv.cache import KVCache
from app.gpu.kv.loan import lend_nothing
from app.gpu.kv.phases import Phases
from app.gpu.kv.placement import Placement
from app.gpu.kv.tiers import KVTiers
from app.gpu.planning.drafting import Drafting
from app.gpu.planning.scheduler import Scheduler
from app.gpu.state.blocks import BlockPool
from app.gpu.state.moves import Moved
from app.gpu.state.sequence import TokenSequence, TurnState
from loadgen.processes.launch import NO_FLAGS, processor_flags

BLOCK_SIZE, BLOCK_BYTES = 16, 64_000
CONTEXT_TOKENS, TURN_TOKENS = 1024, 64
STEP_S, MOVE_S, THINK_S = 0.03, 0.002, (55.0, 77.0)
LAYERS = 32

T = TypeVar("T")


class World:
    """Sessions that think, return and decode. `wanted` of them are due from the start on, and find no room."""

    def __init__(self, sessions: int, wanted: int, running: int, *, max_draft_tokens: int) -> None:
        self.now, self._running = 0.0, running
        blocks = CONTEXT_TOKENS // BLOCK_SIZE
        on_device = (blocks + 3 * TURN_TOKENS // BLOCK_SIZE) * running + 8 * blocks
        cache = KVCache(BlockPool(on_device, BLOCK_SIZE), BlockPool(4 * blocks * sessions, BLOCK_SIZE))
        self.placement = Placement(
            KVTiers(cache, BLOCK_BYTES, LAYERS), KVPolicy.SIGNAL, 0, lambda: self.now, lend_nothing
        )
        most = 1 << 20
        drafting = Drafting(cache, max_tokens=max_draft_tokens, num_layers=LAYERS, max_model_len=most)
        self.scheduler = Scheduler(
            self.placement,
            drafting,
            num_layers=LAYERS,
            max_step_tokens=2048,
            max_running=running,
            shared_prompt_tokens=1024,
            shared_rows=running,
            prompts_rest=True,
        )
        self.phases = Phases(self.placement, self.scheduler.headroom)
        self.times: dict[str, list[float]] = defaultdict(list)
        self._random = random.Random(1)
        self._tickets = map(Ticket, itertools.count(1))
        for number in range(sessions):
            self._open(number)
        for sequence in list(self.placement.away.values())[: wanted + running]:
            self._signal(sequence, 0.0)

    def step(self) -> None:
        """One step, and what clients do meanwhile."""
        for move in self.placement.take_orders():
            self.placement.complete(Moved(move.number, MOVE_S))
        self._timed("tick", self.phases.tick)
        self._begin_turns()
        plan = self._timed("plan", self.scheduler.plan)
        for row in plan.rows:
            self.scheduler.cache.commit(row.sequence, row.first + row.length)
            if row.samples:
                row.sequence.tokens.append(self._random.randrange(30_000))
            if row.turn.generated(len(row.sequence.tokens)) >= row.turn.stop.max_tokens:
                self._end_turn(row.sequence)
        self.now += STEP_S

    def describe(self) -> str:
        """How many sessions are where."""
        queue, away = self.scheduler.queue, self.placement.away
        wanted = sum(s.return_time <= self.now for s in away.values())
        return f"{len(queue.running)} running, {len(queue.waiting)} waiting, {len(away)} away, {wanted} of them wanted"

    def _open(self, number: int) -> None:
        tokens = [self._random.randrange(30_000) for _ in range(CONTEXT_TOKENS)]
        sequence = TokenSequence(SessionId(f"s{number}"), b"", tokens=tokens)
        cache = self.scheduler.cache
        cache.reserve(sequence, CONTEXT_TOKENS)
        cache.commit(sequence, CONTEXT_TOKENS)
        self.placement.end_turn(sequence)
        self.placement.tiers.park(sequence)
        for move in self.placement.take_orders():
            self.placement.complete(Moved(move.number, MOVE_S))
        self.placement.refile(sequence)
        self._signal(sequence, self._random.uniform(0.5, THINK_S[1]))

    def _signal(self, sequence: TokenSequence, think_s: float | None = None) -> None:
        think_s = self._random.uniform(*THINK_S) if think_s is None else think_s
        self._timed("signal", partial(self.phases.signal, sequence, Phase.IO_WAIT, think_s))

    def _begin_turns(self) -> None:
        """Clients whose tools have answered go on: first those whose KV is back."""
        placement, free = self.placement, self._running - len(self.scheduler.queue)
        for sequence in [*placement.resident.values(), *placement.away.values()]:
            if free and sequence.return_time <= self.now:
                free -= 1
                sequence.tokens += [self._random.randrange(30_000) for _ in range(16)]
                stop = StopRule(self._random.randint(1, 2 * TURN_TOKENS))
                sequence.turn = TurnState(next(self._tickets), SamplingParams(seed=0), stop, len(sequence.tokens), 0)
                self.phases.forget(sequence)
                self.scheduler.enqueue(sequence)

    def _end_turn(self, sequence: TokenSequence) -> None:
        sequence.turn = None
        self.scheduler.retire(sequence)
        if len(sequence.tokens) > CONTEXT_TOKENS + 2 * TURN_TOKENS:  # as clients that keep a window do
            self.placement.tiers.truncate(sequence, CONTEXT_TOKENS)
            self.placement.refile(sequence)
        self._signal(sequence)

    def _timed(self, name: str, act: Callable[[], T]) -> T:
        begin = time.thread_time()
        result = act()
        self.times[name].append((time.thread_time() - begin) * 1e3)
        return result


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m benchmarks.planning", description=__doc__)
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument("--wanted", type=int, default=1_000)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--max-draft-tokens", type=int, default=0)
    options = parser.parse_args()
    print(f"processor: {' '.join(processor_flags()) or NO_FLAGS}")
    world = World(options.sessions, options.wanted, options.running, max_draft_tokens=options.max_draft_tokens)
    for _ in range(100):
        world.step()
    print(world.describe())
    world.times.clear()
    gc.collect()
    gc.freeze()
    for _ in range(options.steps):
        world.step()
    print(world.describe())
    for name, times in world.times.items():
        p50, p99 = statistics.median(times), statistics.quantiles(times, n=100)[98]
        print(f"{name:>8}: {len(times):6} calls, p50 {p50:.3f} ms, p99 {p99:.3f} ms, most {max(times):.3f} ms")


if __name__ == "__main__":
    main()
