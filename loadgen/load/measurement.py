"""How a load is measured, whatever the load is."""

import math
from dataclasses import dataclass

from loadgen.errors import LoadgenError, require_at_least
from loadgen.plans import option


@dataclass(frozen=True, slots=True)
class Measurement:
    """Every target runs the same trace `repeats` times. Turns sent in the first `warmup_s` seconds of a run are in no
    distribution and no rate. A turn that takes longer than `turn_timeout_s` has failed. One is good that takes at most
    `slo_ttft_s` to its first token and `slo_tpot_s` for each further one; None is no limit.

    Raises `LoadgenError` if a value is outside its range.
    """

    repeats: int = option(1, "times that every target runs the trace, in alternating order")
    warmup_s: float = option(0.0, "seconds at the start of a run of which no turn is measured", flag="--warmup")
    turn_timeout_s: float = option(600.0, "seconds after which a turn has failed", flag="--turn-timeout")
    slo_ttft_s: float | None = option(
        None, "seconds to the first token that a good turn takes at most (default: no limit)", flag="--slo-ttft"
    )
    slo_tpot_s: float | None = option(
        None, "seconds per further token that a good turn takes at most (default: no limit)", flag="--slo-tpot"
    )

    def __post_init__(self) -> None:
        require_at_least(1, self, "repeats")
        if not 0 <= self.warmup_s < math.inf:
            raise LoadgenError("warmup_s must be at least 0 and finite, in seconds")
        if not 0 < self.turn_timeout_s < math.inf:
            raise LoadgenError("turn_timeout_s must be above 0 and finite, in seconds")
        for name in ("slo_ttft_s", "slo_tpot_s"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise LoadgenError(f"{name} must be above 0, in seconds")
