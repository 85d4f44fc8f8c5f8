"""What sessions tell of their turns: Prometheus metrics, by the clock of each, and the beginning of its span, in words
that need no OpenTelemetry.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram

from app.domain.activations import ResumeCost
from app.domain.memory_map import SessionMemory
from app.domain.values import FinishReason, SamplingParams, SessionId
from app.messages import Failed, Paused, Probed, Started, Token, TurnEvent, TurnFinished

TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
CHECKPOINT_BUCKETS = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1)
TURN_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)


def labelled(name: str, text: str, label: str, values: Iterable[str], registry: CollectorRegistry) -> Counter:
    """A counter with a series for each of the label's `values` at once: one that begins with its first event has no
    rate of it, and a share has no second operand.
    """
    counter = Counter(name, text, [label], registry=registry)
    for value in values:
        counter.labels(value)
    return counter


class TurnMetrics:
    """Turns of one server, in the given registry."""

    def __init__(self, own: CollectorRegistry) -> None:
        count, turns = partial(Counter, registry=own), partial(Histogram, buckets=TURN_BUCKETS, registry=own)
        checkpoints = partial(Histogram, buckets=CHECKPOINT_BUCKETS, registry=own)
        self.prompt_tokens = count("djinn_prompt_tokens", "Context tokens that turns started from")
        self.generation_tokens = count("djinn_generation_tokens", "Tokens generated")
        self.recomputed_tokens = count("djinn_recomputed_tokens", "Tokens whose KV had been lost")
        self.cache_queries = count("djinn_prefix_cache_queries", "Tokens looked up in the KV")
        self.cache_hits = count("djinn_prefix_cache_hits", "Tokens whose KV was there already")
        self.first_token = turns("djinn_time_to_first_token_seconds", "From submit to first token")
        tokens = partial(Histogram, buckets=TOKEN_BUCKETS, registry=own)
        self.inter_token = tokens("djinn_inter_token_latency_seconds", "Between two tokens of a turn")
        self.queue = turns("djinn_turn_queue_seconds", "From submit to start, without the wait for KV on its way")
        self.restore = turns("djinn_turn_restore_seconds", "Wait for KV on its way, of turns that had to wait for it")
        with_history = "From submit to first token, of turns that go on with a history"
        self.resumed_first_token = turns("djinn_resumed_first_token_seconds", with_history)
        parts, spent = ("queue", "restore", "prefill"), "What those seconds were spent on"
        self.resumed_waits = labelled("djinn_resumed_wait_seconds", spent, "part", parts, own)
        kept = "Engine time to keep the residual stream of a turn that pauses"
        self.checkpoint_save = checkpoints("djinn_checkpoint_save_seconds", kept)
        put_back = (
            "Engine time to put the residual stream of a resumed turn back into the batch, or on a GPU to launch that"
        )
        self.checkpoint_restore = checkpoints("djinn_checkpoint_restore_seconds", put_back)
        carried_out = "Engine time to carry out the command to resume"
        self.resume_dispatch = checkpoints("djinn_resume_dispatch_seconds", carried_out)
        self.turn = turns("djinn_turn_seconds", "From submit to end")
        self.finished = labelled("djinn_turns_finished", "Turns that ended", "finished_reason", FinishReason, own)
        self.probed = count("djinn_probe_values", "Positions at which probes were read")
        self.halted = count("djinn_probe_halts", "Times that a probe stopped or paused a turn")
        self.failed = Counter("djinn_turns_failed", "Turns that failed", ["code"], registry=own)


class TurnClock:
    """Times one turn, from the moment it is made, and records it. `is_resumed`: its session has a history already."""

    def __init__(self, metrics: TurnMetrics, *, is_resumed: bool = False) -> None:
        self._metrics = metrics
        self._is_resumed = is_resumed
        self._submitted = time.perf_counter()
        self._started = self._submitted
        self._last_token: float | None = None
        self._begun = False
        self._has_paused = False
        """Since the last token: the time to the next one is the client's then."""
        self.queue_ms = 0.0
        self.restore_ms = 0.0
        self.prefill_ms = 0.0

    def observe(self, event: TurnEvent) -> None:
        """Take the turn's next event."""
        now = time.perf_counter()
        match event:
            case Started() if not self._begun:
                # Its own time: it is delivered together with the first tokens.
                self._started, self._begun = event.at, True
                self._observe_start(event)
            case Token():
                self._observe_token(now)
            case Probed():
                self._metrics.probed.inc(len(event.positions))
                self._metrics.halted.inc(event.halts)
            case Paused():
                if self._last_token is None and not self._has_paused:
                    self.prefill_ms = (now - self._started) * 1000  # what comes after is not the engine's time alone
                self._has_paused = True
                self._metrics.checkpoint_save.observe(event.checkpoint.saved_ms / 1000)
                self._observe_resume(event.resumed)
            case TurnFinished():
                self._observe_resume(event.resumed)
                self._observe_end(event, now)
            case Failed():
                self._metrics.failed.labels(event.error.code).inc()

    def _observe_start(self, event: Started) -> None:
        self.restore_ms = event.restore_ms
        self.queue_ms = max(0.0, (event.at - self._submitted) * 1000 - event.restore_ms)
        self._metrics.queue.observe(self.queue_ms / 1000)
        if event.restore_ms:
            self._metrics.restore.observe(event.restore_ms / 1000)

    def _observe_token(self, now: float) -> None:
        if self._has_paused:
            self._has_paused = False
        elif self._last_token is None:
            self.prefill_ms = (now - self._started) * 1000
            self._metrics.first_token.observe(now - self._submitted)
            if self._is_resumed:
                self._metrics.resumed_first_token.observe(now - self._submitted)
                parts = {"queue": self.queue_ms, "restore": self.restore_ms, "prefill": self.prefill_ms}
                for part, ms in parts.items():
                    self._metrics.resumed_waits.labels(part).inc(ms / 1000)
        else:
            self._metrics.inter_token.observe(now - self._last_token)
        self._last_token = now

    def _observe_resume(self, cost: ResumeCost | None) -> None:
        if cost is not None:
            self._metrics.resume_dispatch.observe(cost.dispatch_ms / 1000)
            self._metrics.checkpoint_restore.observe(cost.restore_ms / 1000)

    def _observe_end(self, event: TurnFinished, now: float) -> None:
        usage = event.usage
        self._metrics.turn.observe(now - self._submitted)
        self._metrics.finished.labels(event.reason.value).inc()
        self._metrics.prompt_tokens.inc(usage.prompt_tokens)
        self._metrics.generation_tokens.inc(usage.completion_tokens)
        self._metrics.recomputed_tokens.inc(usage.tokens_recomputed)
        self._metrics.cache_queries.inc(usage.prompt_tokens)
        self._metrics.cache_hits.inc(usage.cached_tokens)


TRACE_RESPONSE = "traceresponse"
"""The header of an answer that names the span of its turn, and its key in the state of the request."""
CLOSE_S = 3.0
"""How long the end of the server may wait for the collector of spans."""


@dataclass(frozen=True, slots=True)
class TurnStart:
    """What is known of a turn at its beginning. It has no text and no token."""

    session: SessionId
    owner: str | None
    model: str
    kv: SessionMemory
    """Where the session's KV is."""
    max_tokens: int
    param: str = ""
    """The field that its tokens came from."""
    sampling: SamplingParams | None = None
    """None: the turn was paused elsewhere, and goes on from there."""
    copy_of: object = None
    """The `TurnSpan` of the turn that it was copied from."""

    @property
    def is_copy(self) -> bool:
        """Whether it begins with a pause."""
        return self.sampling is None
