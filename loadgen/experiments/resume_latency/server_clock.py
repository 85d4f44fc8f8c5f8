"""Where the time of one resume went, by the server's own clocks."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from loadgen.experiments.resume_latency.findings import ServerSplit
from loadgen.targets.subject import Subject

DISPATCH = "djinn_resume_dispatch_seconds"
CHECKPOINT = "djinn_checkpoint_restore_seconds"


@dataclass(frozen=True, slots=True)
class ServerClock:
    """Totals since the server started, in seconds; None where it does not tell."""

    dispatch_s: float | None
    copy_s: float
    checkpoint_s: float | None

    @classmethod
    async def read(cls, subject: Subject) -> ServerClock:
        """As they are now. Raises `DjinnError`."""
        metrics, memory = await subject.metrics(), await subject.memory()
        return cls(read_sum(metrics, DISPATCH), memory.moves["in"].seconds, read_sum(metrics, CHECKPOINT))

    def until(self, later: ServerClock) -> ServerSplit:
        """What was added between this reading and a later one; exact while no other client uses the server."""
        return ServerSplit(
            dispatch_s=_difference(self.dispatch_s, later.dispatch_s),
            copy_s=later.copy_s - self.copy_s,
            checkpoint_s=_difference(self.checkpoint_s, later.checkpoint_s),
        )


def read_sum(metrics: str, name: str) -> float | None:
    """The sum of histogram `name` in the text of `/metrics`; None if there is no such one."""
    sums = [
        sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == f"{name}_sum"
    ]
    return sum(sums) if sums else None


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before
