"""How many turns were as fast as they had to be."""

from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.load.measurement import Measurement
from loadgen.load.records import TurnRecord


@dataclass(frozen=True, slots=True)
class Goodput:
    """Turns that met every limit: how many per second, and their share of the turns that ran or failed."""

    turns_per_s: float
    share: float


def goodput(turns: Sequence[TurnRecord], failed: int, seconds: float, limits: Measurement) -> Goodput | None:
    """The goodput of the turns that completed within `seconds`, beside `failed` that did not complete.

    None without a limit, and where nothing was measured.
    """
    if (limits.slo_ttft_s, limits.slo_tpot_s) == (None, None) or not seconds or not (turns or failed):
        return None
    good = sum(_is_good(record, limits) for record in turns)
    return Goodput(good / seconds, good / (len(turns) + failed))


def _is_good(record: TurnRecord, limits: Measurement) -> bool:
    return _within(record.ttft_s, limits.slo_ttft_s) and _within(record.tpot_s, limits.slo_tpot_s)


def _within(value: float | None, limit: float | None) -> bool:
    """A turn of one token has no time per further token: it cannot miss that limit."""
    return value is None or limit is None or value <= limit
