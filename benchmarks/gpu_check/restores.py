"""From the command to go on with a paused pass to the moment when its residual stream is back in the batch."""

import time
from random import Random
from typing import cast

import numpy as np
from torch import Tensor

from app.domain.breakpoints import NEXT_BREAKPOINT, Action, Breakpoint, Pass, Until, When
from app.domain.values import SessionId
from app.gpu.attention.batch import Batch
from app.gpu.models.base import LayerStack
from app.messages import Paused
from benchmarks.figures import Target
from benchmarks.gpu_check.away import random_tokens
from benchmarks.gpu_check.context import StageContext, StageFailed
from benchmarks.gpu_check.engines import FEW, build, synchronize
from benchmarks.gpu_check.live import LiveEngine
from benchmarks.gpu_check.plan import BreakpointPlan
from benchmarks.spread import middle_half

RESTORED_MS = Target(1.3)
WARM_UP = 3


class WatchedStack:
    """A model that, when told to, notes when what runs next, a layer or the head, has its input on the device."""

    def __init__(self, stack: LayerStack, device: str) -> None:
        self._stack = stack
        self._device = device
        self._watches = False
        self.ready_at = 0.0

    def __getattr__(self, name: str) -> object:
        return getattr(self._stack, name)

    def watch(self) -> None:
        """What runs next is it."""
        self._watches = True

    def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        """See `LayerStack.layer`."""
        self._note()
        return self._stack.layer(index, hidden, batch, kv)

    def head(self, hidden: Tensor) -> Tensor:
        """See `LayerStack.head`."""
        self._note()
        return self._stack.head(hidden)

    def _note(self) -> None:
        if self._watches:
            synchronize(self._device)
            self.ready_at, self._watches = time.perf_counter(), False


def measure_restores(context: StageContext, stack: LayerStack) -> None:
    """Pauses in decode, in the middle of the model at every token; and in a prompt, layer by layer."""
    plan, device = context.plan.breakpoints, context.plan.device
    watched = WatchedStack(stack, device)
    tokens = plan.prefill_tokens
    settings = {"kv_device": f"2x{tokens + 256}", "kv_policy": "none", "max_step_tokens": tokens}
    with build(context, plan.model, cast("LayerStack", watched), max_running=FEW, **settings) as live:
        decode = _decode(live, watched, plan)
        prefill = _prefill(live, watched, plan)
    for name, seconds in (("a decode pass", decode), (f"a prompt of {tokens} tokens", prefill)):
        milliseconds = [each * 1e3 for each in seconds]
        context.journal.samples(f"restores of {name}, ms", milliseconds)
        label = f"Checkpoint of {name} restored, from `Resume` to the first layer"
        context.journal.figure(f"{label}, p50", "ms", middle_half(milliseconds), RESTORED_MS)
        context.journal.value(f"{label}, p99", "ms", float(np.quantile(milliseconds, 0.99)))


def _decode(live: LiveEngine, watched: WatchedStack, plan: BreakpointPlan) -> list[float]:
    stop = Breakpoint("middle", (live.info.num_layers // 2,), Action.PAUSE, When(Pass.DECODE))
    session, count = live.open([stop]), WARM_UP + plan.restores
    live.generate(session, random_tokens(Random(0), plan.prompt_tokens), count + 2)
    times = [_go_on(live, watched, session, NEXT_BREAKPOINT) for _ in range(count)]
    live.close(session)
    return times[WARM_UP:]


def _prefill(live: LiveEngine, watched: WatchedStack, plan: BreakpointPlan) -> list[float]:
    random, times = Random(1), list[float]()
    while len(times) < plan.restores // 2:
        session = live.open([Breakpoint("first", (0,), Action.PAUSE, When(Pass.PREFILL))])
        live.generate(session, random_tokens(random, plan.prefill_tokens))
        times += [_go_on(live, watched, session, Until(layer=layer)) for layer in range(1, live.info.num_layers)]
        live.close(session)
    return times[1:]


def _go_on(live: LiveEngine, watched: WatchedStack, session: SessionId, until: Until) -> float:
    """Seconds of one restore; the session is paused again afterwards."""
    watched.watch()
    turn = live.resume(session, until)
    live.finish(turn)
    if not isinstance(turn.end, Paused):
        raise StageFailed("a turn ended that was to pause")
    return watched.ready_at - turn.sent_at
