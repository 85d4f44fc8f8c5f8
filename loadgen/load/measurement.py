"""How a load is measured, whatever the load is."""

import math
from dataclasses import dataclass

from loadgen.errors import LoadgenError, require_at_least


@dataclass(frozen=True, slots=True)
class Slo:
    """What a turn has to meet to count as good, in seconds; None is no limit. Raises `LoadgenError` unless above 0."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        for name, limit in (("slo_ttft", self.ttft_s), ("slo_tpot", self.tpot_s)):
            if limit is not None and not limit > 0:
                raise LoadgenError(f"{name} must be above 0")


@dataclass(frozen=True, slots=True)
class Measurement:
    """Every target runs the same trace `repeats` times. Turns sent in the first `warmup_s` seconds of a run are in no
    distribution and no rate. A turn that takes longer than `turn_timeout_s` has failed.

    Raises `LoadgenError` if a value is outside its range.
    """

    repeats: int = 1
    warmup_s: float = 0.0
    turn_timeout_s: float = 600.0
    slo: Slo = Slo()

    def __post_init__(self) -> None:
        require_at_least(1, self, "repeats")
        if not 0 <= self.warmup_s < math.inf:
            raise LoadgenError("warmup must be at least 0 and finite, in seconds")
        if not 0 < self.turn_timeout_s < math.inf:
            raise LoadgenError("turn_timeout must be above 0 and finite, in seconds")
