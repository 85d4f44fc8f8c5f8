"""What this machine copies at best, how fast a session's KV leaves the device and comes back, and how soon the model
is back where the session was: recomputed, by hand-written code, and by Djinn.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from random import Random
from statistics import median

import torch

from app.domain.breakpoints import Action, Breakpoint, Pass, Until, When
from app.domain.values import ModelInfo, SessionId
from app.messages import Paused
from benchmarks.engine.live import LiveEngine, Moved, Passer, check_whole, fetch, park, random_tokens
from benchmarks.engine.loading import FEW, WatchedStack, build, load, load_layers
from benchmarks.gpu_check.journal import SkipStage, StageContext
from benchmarks.gpu_check.plan import MIB, CopyPlan, ResumePlan, SwapPlan
from benchmarks.measuring import middle_half, ratio_of_medians
from loadgen.errors import NotAsMeant
from loadgen.report.tables import Spread, Target

LEAST_BYTES = 256 << 20
"""Under one reading of the clock: a small copy is made so often."""


class PlainCopies:
    """Buffers of `size` bytes for each way, pinned where the device is a GPU, all written once."""

    def __init__(self, size: int, device: str) -> None:
        self.size = size
        self._cuda = device == "cuda"
        self._host = torch.ones(2, size, dtype=torch.uint8, pin_memory=self._cuda)
        self._device = torch.ones(2, size, dtype=torch.uint8, device=device)
        self._streams = [torch.cuda.Stream() for _ in range(2)] if self._cuda else []

    def to_device(self, times: int = 1) -> float:
        """Bytes a second, in GB, of copies of which the last has arrived."""
        return times * self.size / self._timed(lambda: self._queue(0, times)) / 1e9

    def to_host(self, times: int = 1) -> float:
        return times * self.size / self._timed(lambda: self._queue(1, times)) / 1e9

    def both_ways(self, times: int = 1) -> float:
        """Both at once, their bytes together."""

        def both() -> None:
            for way in range(2):
                self._queue(way, times)

        return 2 * times * self.size / self._timed(both) / 1e9

    def _queue(self, way: int, times: int) -> None:
        source, target = (self._host[0], self._device[0]) if way == 0 else (self._device[1], self._host[1])
        if not self._cuda:
            for _ in range(times):
                target.copy_(source)
            return
        with torch.cuda.stream(self._streams[way]):
            for _ in range(times):
                target.copy_(source, non_blocking=True)

    def _timed(self, work: Callable[[], None]) -> float:
        _wait(self._device.device.type)
        began = time.perf_counter()
        work()
        _wait(self._device.device.type)
        return time.perf_counter() - began


def memory_bandwidth(device: str, nbytes: int, rounds: int) -> Spread:
    """GB/s of copies of `nbytes` within the device's memory: bytes read and bytes written."""
    source, target = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    times = 1 + LEAST_BYTES // nbytes if device == "cpu" else 8
    rates = []
    for _ in range(rounds + 1):
        _wait(device)
        began = time.perf_counter()
        for _ in range(times):
            target.copy_(source)
        _wait(device)
        rates.append(2 * nbytes * times / (time.perf_counter() - began) / 1e9)
    if device == "cuda":
        del source, target
        torch.cuda.empty_cache()  # an engine that comes next looks at what is free
    return Spread.over(rates[1:])


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def stage_copies(context: StageContext) -> None:
    """Copies of every size, each way alone and both at once."""
    plan, journal, device = context.plan.copies, context.journal, context.device
    if device == "cuda" and not torch.cuda.is_available():
        raise SkipStage("there is no CUDA device")
    journal.figure("Device memory, read and written", "GB/s", memory_bandwidth(device, plan.memory_bytes, plan.rounds))
    for size in plan.sizes:
        _measure(context, plan, size)


def _measure(context: StageContext, plan: CopyPlan, size: int) -> None:
    copies, journal = PlainCopies(size, context.device), context.journal
    times = max(1, LEAST_BYTES // size) if context.device == "cuda" else 1
    ways = {"to the device": copies.to_device, "to the host": copies.to_host, "both ways": copies.both_ways}
    for name, copy in ways.items():
        rates = [copy(times) for _ in range(plan.rounds + 1)][1:]
        journal.samples(f"{name}, {size} bytes, GB/s", rates)
        journal.point("Pinned copies", name, size / MIB, median(rates))
        if size == plan.sizes[-1]:
            journal.figure(f"Pinned copy {name}, {size / MIB:g} MiB", "GB/s", Spread.over(rates))


SHARE = Target(0.9, at_least=True)
LEAST_S = 5.0


def stage_swap(context: StageContext) -> None:
    """Rounds of a plain copy and a move, each way."""
    plan = context.plan.swap
    plain = PlainCopies(plan.plain_bytes, context.device)
    budgets = {"kv_device": f"1x{plan.device_tokens}", "kv_host": f"3x{plan.device_tokens}"}
    rounds: list[dict[str, float]] = []
    with load(context, plan.model, max_running=FEW, **budgets) as live:
        random = Random(0)
        passer = Passer(live, random, plan.device_tokens)
        _round(live, plan, plain, passer, random)  # not kept: nothing shall be allocated or compiled under the clock
        before = live.memory().moves
        while len(rounds) < plan.rounds and (not rounds or context.left_s > LEAST_S):
            rounds.append(_round(live, plan, plain, passer, random))
        after = live.memory().moves
        if plan.turns:
            turns = [_first_tokens(live, plan, passer, random) for _ in range(plan.rounds + 1)][1:]
            _report_turns(context, turns)
    for way in ("out", "in"):
        seconds = after[way].seconds - before[way].seconds
        own = (after[way].bytes - before[way].bytes) / seconds / 1e9
        _report_way(context, way, rounds, own)
    context.journal.fact("session in swap", f"{plan.tokens} tokens of {plan.model}, {_gib(live, plan):.2f} GiB")


READY, COLD, SECOND_PARK = Target(1.05), Target(1.0), Target(0.1)
NEW_TOKENS, KINDS = 16, ("resident", "resident again", "ready", "cold")
"""A turn of so many new tokens: in a session that stayed, in one that was called back, and in one that was not."""


def _first_tokens(live: LiveEngine, plan: SwapPlan, passer: Passer, random: Random) -> dict[str, float]:
    """Seconds to the first token of a turn of each kind, in random order, and how long the cold one waited for its KV;
    and the bytes of a session's second park over those of its first.
    """
    found: dict[str, float] = {}
    for kind in random.sample(KINDS, len(KINDS)):
        session = live.open()
        live.generate(session, random_tokens(random, plan.tokens - 2 * NEW_TOKENS))
        first = None
        if kind in ("ready", "cold"):
            first = park(live, session)
            passer.pass_over()
        if kind == "ready":
            fetch(live, session)
        turn = live.generate(session, random_tokens(random, NEW_TOKENS))
        found[kind] = turn.times[0] - turn.sent_at
        if kind == "cold":
            found["restore"] = turn.restore_s
        if kind == "ready" and first is not None:
            found["second park"] = park(live, session).bytes / first.bytes
        live.close(session)
    return found


def _report_turns(context: StageContext, turns: list[dict[str, float]]) -> None:
    journal, of = context.journal, {name: [each[name] for each in turns] for name in turns[0]}
    for name in (*KINDS, "restore"):
        journal.samples(f"first token, {name}, ms", [1e3 * seconds for seconds in of[name]])
    for name in ("resident", "ready", "cold"):
        journal.figure(f"First token, {name}", "ms", middle_half([1e3 * seconds for seconds in of[name]]))
    together = [one + restore for one, restore in zip(of["resident"], of["restore"], strict=True)]
    journal.figure("Resident again / resident: the noise", "×", ratio_of_medians(of["resident again"], of["resident"]))
    journal.figure("`ready` sent ahead / resident", "×", ratio_of_medians(of["ready"], of["resident"]), READY)
    journal.figure("Cold / (resident + restore)", "×", ratio_of_medians(of["cold"], together), COLD)
    journal.figure("Bytes of a second park / first", "×", Spread.over(of["second park"]), SECOND_PARK)


def _round(live: LiveEngine, plan: SwapPlan, plain: PlainCopies, passer: Passer, random: Random) -> dict[str, float]:
    """GB/s of everything once."""
    session = live.open()
    live.generate(session, random_tokens(random, plan.tokens))
    found = {"plain out": plain.to_host()}
    found["out"] = _checked(live, park(live, session), plan)
    passer.pass_over()
    found["plain in"] = plain.to_device()
    found["in"] = _checked(live, fetch(live, session), plan)
    live.close(session)
    return found


def _checked(live: LiveEngine, moved: Moved, plan: SwapPlan) -> float:
    check_whole(live, moved, plan.tokens)
    return moved.gb_per_s


def _report_way(context: StageContext, way: str, rounds: list[dict[str, float]], own: float) -> None:
    journal, name = context.journal, {"out": "Leaving the device", "in": "Coming back"}[way]
    rates, plain = [each[way] for each in rounds], [each[f"plain {way}"] for each in rounds]
    journal.samples(f"moves {way}, GB/s", rates)
    journal.samples(f"plain copies {way}, GB/s", plain)
    journal.figure(f"{name}, from signal to news", "GB/s", Spread.over(rates))
    journal.figure(f"Plain pinned copy beside it, {way}", "GB/s", Spread.over(plain))
    shares = [rate / copy for rate, copy in zip(rates, plain, strict=True)]
    journal.figure(f"{name} / plain pinned copy", "×", Spread.over(shares), SHARE)
    journal.value(f"{name}, by the engine's own clock", "GB/s", own)


def _gib(live: LiveEngine, plan: SwapPlan) -> float:
    return plan.tokens * live.info.kv_bytes_per_token / 2**30


class Snapshot:
    """Hand-written offload of one session's KV: what an expert would write for one session alone. No blocks, no other
    sessions: one contiguous buffer in host memory, pinned where there is CUDA, one as large on the device, both
    allocated and touched, a single copy on a stream of its own, and everything done once before anything is timed.

    Positions before `first` have been through all layers, the others up to each layer of `after`.
    """

    def __init__(self, info: ModelInfo, tokens: int, first: int, after: Sequence[int], device: str) -> None:
        self._layers, self._first, self._tokens = info.num_layers, first, tokens - first
        self._elements = info.kv_heads * info.head_dim * 2
        dtype: torch.dtype = getattr(torch, info.dtype)
        self._cuda = device == "cuda"
        sizes = self._count(self._layers - 1), self._tokens * info.hidden_size
        self._host, self._hidden = (torch.ones(size, dtype=dtype, pin_memory=self._cuda) for size in sizes)
        self._back, self._hidden_back = (torch.zeros(size, dtype=dtype, device=device) for size in sizes)
        self._stream = torch.cuda.Stream() if self._cuda else None
        self.restore_s(min(after))  # what is slow only once is not timed

    def restore_s(self, after: int) -> float:
        """Seconds to bring back what the pass has had after that layer."""
        count = self._count(after)
        self._back.zero_()
        _wait(self._back.device.type)
        began = time.perf_counter()
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._back[:count].copy_(self._host[:count], non_blocking=True)
            self._hidden_back.copy_(self._hidden, non_blocking=True)
        _wait(self._back.device.type)
        return time.perf_counter() - began

    def _count(self, after: int) -> int:
        """Elements of all layers of the positions before the pass, and then of the pass up to that layer."""
        return self._elements * (self._layers * self._first + (after + 1) * self._tokens)


BESIDE_RECOMPUTE = Target(1.0)
BACK = "Back after a layer"


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds until the model stands after the layer again, with KV and residual stream on the device; for Djinn from
    the client's `Resume` on. `token_s`: of Djinn, until the next token.
    """

    recompute: float
    offload: float
    djinn: float
    token_s: float


def stage_resume(context: StageContext) -> None:
    """Every layer in every round."""
    plan = context.plan.resume
    found: dict[int, list[Sample]] = {layer: [] for layer in plan.layers}
    budgets = {"kv_device": f"1x{plan.device_tokens}", "kv_host": f"3x{plan.device_tokens}"}
    watched = WatchedStack(load_layers(context, plan.model), context.device)
    with build(context, plan.model, watched, max_running=FEW, **budgets) as live:
        bench = _Bench(live, watched, plan, context.device)
        bench.sample(plan.layers[0])  # not kept: nothing shall be allocated or compiled under the clock
        for _ in range(plan.rounds):
            for layer in plan.layers:
                if not found[layer] or context.left_s > LEAST_S:
                    found[layer].append(bench.sample(layer))
    for layer, samples in found.items():
        _report_layer(context, layer, samples)
    context.journal.fact("last pass in resume", f"from position {bench.first} of {plan.tokens}")
    context.journal.note(
        "Both bring back the KV of all layers for the tokens before the last pass. For those in it they bring only "
        "that of the layers that have run. Hand-written offload is one copy, Djinn moves blocks."
    )


@dataclass(frozen=True, slots=True)
class _Stand:
    """A session that has just paused, whose last pass began at position `first`."""

    session: SessionId
    seconds: float
    first: int


class _Bench:
    def __init__(self, live: LiveEngine, watched: WatchedStack, plan: ResumePlan, device: str) -> None:
        self._live = live
        self._watched = watched
        self._plan = plan
        self._random = Random(0)
        self._passer = Passer(live, self._random, plan.device_tokens)
        stand = self._pause(plan.layers[0])
        live.close(stand.session)
        self.first = stand.first
        self._snapshot = Snapshot(live.info, plan.tokens, self.first, [layer - 1 for layer in plan.layers], device)

    def sample(self, layer: int) -> Sample:
        """Each way once, each with a text of its own."""
        stand = self._pause(layer)
        self._live.close(stand.session)
        return Sample(stand.seconds, self._snapshot.restore_s(layer - 1), *self._come_back(layer))

    def _come_back(self, layer: int) -> tuple[float, float]:
        """Away, and back by `Resume`: to where it was, and to its next token."""
        live, session = self._live, self._pause(layer).session
        park(live, session)
        self._passer.pass_over()
        before = live.place(session).bytes_in
        self._watched.watch()
        turn = live.resume(session, Until(end=True))
        live.finish(turn)
        if not turn.times:
            raise NotAsMeant("a turn that was resumed gave no token")
        standing_s = self._watched.ready_at - turn.sent_at
        half = (self._plan.tokens - self.first) * layer // live.info.num_layers  # as many tokens have as much KV
        check_whole(live, Moved(standing_s, live.place(session).bytes_in - before), self.first + half)
        live.close(session)
        return standing_s, turn.times[0] - turn.sent_at

    def _pause(self, layer: int) -> _Stand:
        """A fresh session that stands after `layer`."""
        last = self._plan.tokens - 1
        stop = Breakpoint("stop", (layer - 1,), Action.PAUSE, When(Pass.PREFILL, position=last))
        session = self._live.open([stop])
        turn = self._live.generate(session, random_tokens(self._random, self._plan.tokens))
        if not isinstance(turn.end, Paused) or turn.end.checkpoint.layer != layer - 1:
            raise NotAsMeant(f"a turn did not pause after layer {layer}")
        return _Stand(session, turn.ended_at - turn.sent_at, turn.end.checkpoint.first)


def _report_layer(context: StageContext, layer: int, samples: list[Sample]) -> None:
    journal, name = context.journal, f"After layer {layer}"
    ways = {
        "recomputed": [each.recompute for each in samples],
        "hand-written offload": [each.offload for each in samples],
        "Djinn": [each.djinn for each in samples],
    }
    for way, seconds in ways.items():
        milliseconds = [each * 1e3 for each in seconds]
        journal.samples(f"{name}, {way}, ms", milliseconds)
        journal.point(BACK, way, layer, median(milliseconds))
        journal.figure(f"{name}, {way}", "ms", Spread.over(milliseconds))
    journal.figure(f"{name}, Djinn, to the next token", "ms", Spread.over([each.token_s * 1e3 for each in samples]))
    beside_offload = Spread.over([each.djinn / each.offload for each in samples])
    beside_recompute = Spread.over([each.djinn / each.recompute for each in samples])
    wins = layer >= context.plan.resume.recompute_loses_from
    most = context.plan.resume.of_offload
    target = None if most is None else Target(most)
    journal.figure(f"{name}, Djinn / hand-written offload", "×", beside_offload, target)
    journal.figure(f"{name}, Djinn / recomputed", "×", beside_recompute, BESIDE_RECOMPUTE if wins else None)
