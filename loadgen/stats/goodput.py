"""How many turns were as fast as they had to be."""

from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.load.measurement import Slo
from loadgen.load.records import TurnRecord


@dataclass(frozen=True, slots=True)
class Goodput:
    """Turns that met every limit of the SLO: how many per second, and their share of the turns that ran or failed."""

    turns_per_s: float
    share: float


def goodput(turns: Sequence[TurnRecord], failed: int, seconds: float, slo: Slo) -> Goodput | None:
    """The goodput of the turns that completed within `seconds`, beside `failed` that did not complete.

    None without a limit, and where nothing was measured.
    """
    if slo == Slo() or not seconds or not (turns or failed):
        return None
    good = sum(_is_good(record, slo) for record in turns)
    return Goodput(good / seconds, good / (len(turns) + failed))


def _is_good(record: TurnRecord, slo: Slo) -> bool:
    return _within(record.ttft_s, slo.ttft_s) and _within(record.tpot_s, slo.tpot_s)


def _within(value: float | None, limit: float | None) -> bool:
    """A turn of one token has no time per further token: it cannot miss that limit."""
    return value is None or limit is None or value <= limit
