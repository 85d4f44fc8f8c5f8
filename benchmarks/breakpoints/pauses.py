"""A session that pauses again and again: how long the engine takes to go on with it."""

from dataclasses import dataclass

from app.domain.activations import CheckpointInfo
from app.domain.breakpoints import NEXT_BREAKPOINT, Action, Breakpoint, Pass, Until, When
from app.domain.values import SessionId
from benchmarks.breakpoints.engine import BenchEngine
from benchmarks.breakpoints.plan import PREFILL_TOKENS, PROMPT_TOKENS
from benchmarks.text import TokenSource
from loadgen.processes.process import ServerFailedError

WARM_UP = 3


@dataclass(frozen=True, slots=True)
class PauseTimes:
    """Of one pause, in seconds: to leave the batch (save), to take the `Resume` (dispatch), and from the beginning of
    the step that goes on to its first layer (restore), in which the checkpoint takes its place in the batch.
    """

    save_s: float
    dispatch_s: float
    restore_s: float


def measure_decode_pauses(bench: BenchEngine, source: TokenSource, count: int) -> list[PauseTimes]:
    """Pauses in the middle of the model at every generated token."""
    stop = Breakpoint("middle", (bench.num_layers // 2,), Action.PAUSE, When(Pass.DECODE))
    session = bench.open([stop])
    bench.submit(session, source.take(PROMPT_TOKENS), WARM_UP + count + 2)
    bench.pause(session)
    times = [_go_on(bench, session, NEXT_BREAKPOINT, positions=1) for _ in range(WARM_UP + count)]
    bench.close(session)
    return times[WARM_UP:]


def measure_prefill_pauses(bench: BenchEngine, source: TokenSource, count: int) -> list[PauseTimes]:
    """Pauses with a prompt of `PREFILL_TOKENS` tokens, which is taken through the model layer by layer."""
    times: list[PauseTimes] = []
    while len(times) < count:
        session = bench.open([Breakpoint("first", (0,), Action.PAUSE, When(Pass.PREFILL))])
        bench.submit(session, source.take(PREFILL_TOKENS), 1)
        bench.pause(session)
        layers = range(1, bench.num_layers)
        times += [_go_on(bench, session, Until(layer=layer), positions=PREFILL_TOKENS) for layer in layers]
        bench.close(session)
    return times[:count]


def _go_on(bench: BenchEngine, session: SessionId, until: Until, positions: int) -> PauseTimes:
    """Resume, up to the next pause."""
    left = bench.pause(session)
    if left.end - left.first != positions:
        raise ServerFailedError(f"a checkpoint has {left.end - left.first} positions, not {positions}")
    dispatch_s = bench.resume(session, until)
    restore_s = bench.step()
    _check_new(left, bench.pause(session))
    return PauseTimes(left.saved_ms / 1e3, dispatch_s, restore_s)


def _check_new(before: CheckpointInfo, after: CheckpointInfo) -> None:
    if (before.layer, before.first) == (after.layer, after.first):
        raise ServerFailedError("a turn that was resumed is where it was")
