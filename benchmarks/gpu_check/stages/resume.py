"""Back where a session was: recomputed, brought back by hand-written code, and brought back by Djinn."""

from dataclasses import dataclass
from random import Random
from statistics import median

from app.domain.breakpoints import Action, Breakpoint, Pass, Until, When
from app.domain.values import SessionId
from app.messages import Paused
from benchmarks.engine.away import Moved, Passer, check_whole, park, random_tokens
from benchmarks.engine.live import LiveEngine
from benchmarks.engine.loading import FEW, build, load_layers
from benchmarks.engine.watched import WatchedStack
from benchmarks.gpu_check.context import StageContext
from benchmarks.gpu_check.plan import ResumePlan
from loadgen.errors import NotAsMeant
from loadgen.report.figures import Spread, Target
from loadgen.rivals.pinned_offload import Snapshot

BESIDE_OFFLOAD, BESIDE_RECOMPUTE = Target(1.05), Target(1.0)
LEAST_S = 5.0
CHART = "Back after a layer"


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds until the model stands after the layer again, with KV and residual stream on the device; for Djinn from
    the client's `Resume` on. `token_s`: of Djinn, until the next token.
    """

    recompute: float
    offload: float
    djinn: float
    token_s: float


def run(context: StageContext) -> None:
    """Every layer in every round."""
    plan = context.plan.resume
    found: dict[int, list[Sample]] = {layer: [] for layer in plan.layers}
    budgets = {"kv_device": f"1x{plan.device_tokens}", "kv_host": f"3x{plan.device_tokens}"}
    watched = WatchedStack(load_layers(context, plan.model), context.device)
    with build(context, plan.model, watched, max_running=FEW, **budgets) as live:
        bench = _Bench(live, watched, plan)
        bench.sample(plan.layers[0])  # not kept: nothing shall be allocated or compiled under the clock
        for _ in range(plan.rounds):
            for layer in plan.layers:
                if not found[layer] or context.left_s > LEAST_S:
                    found[layer].append(bench.sample(layer))
    for layer, samples in found.items():
        _report(context, layer, samples)
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
    def __init__(self, live: LiveEngine, watched: WatchedStack, plan: ResumePlan) -> None:
        self._live = live
        self._watched = watched
        self._plan = plan
        self._random = Random(0)
        self._passer = Passer(live, self._random, plan.device_tokens)
        stand = self._pause(plan.layers[0])
        live.close(stand.session)
        self.first = stand.first
        self._snapshot = self._make_snapshot()

    def sample(self, layer: int) -> Sample:
        """Each way once, each with a text of its own."""
        stand = self._pause(layer)
        self._live.close(stand.session)
        offload: float = self._snapshot.restore(layer - 1)["standing_s"]
        return Sample(stand.seconds, offload, *self._come_back(layer))

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

    def _make_snapshot(self) -> Snapshot:
        info, plan = self._live.info, self._plan
        elements = info.kv_heads * info.head_dim * 2
        shape = {"layers": info.num_layers, "elements": elements, "hidden_size": info.hidden_size, "dtype": info.dtype}
        history = {"token_ids": [0] * plan.tokens, "first": self.first, "after": [layer - 1 for layer in plan.layers]}
        return Snapshot(shape, None, history)


def _report(context: StageContext, layer: int, samples: list[Sample]) -> None:
    journal, name = context.journal, f"After layer {layer}"
    ways = {
        "recomputed": [each.recompute for each in samples],
        "hand-written offload": [each.offload for each in samples],
        "Djinn": [each.djinn for each in samples],
    }
    for way, seconds in ways.items():
        milliseconds = [each * 1e3 for each in seconds]
        journal.samples(f"{name}, {way}, ms", milliseconds)
        journal.point(CHART, way, layer, median(milliseconds))
        journal.figure(f"{name}, {way}", "ms", Spread.over(milliseconds))
    journal.figure(f"{name}, Djinn, to the next token", "ms", Spread.over([each.token_s * 1e3 for each in samples]))
    beside_offload = Spread.over([each.djinn / each.offload for each in samples])
    beside_recompute = Spread.over([each.djinn / each.recompute for each in samples])
    wins = layer >= context.plan.resume.recompute_loses_from
    journal.figure(f"{name}, Djinn / hand-written offload", "×", beside_offload, BESIDE_OFFLOAD)
    journal.figure(f"{name}, Djinn / recomputed", "×", beside_recompute, BESIDE_RECOMPUTE if wins else None)
