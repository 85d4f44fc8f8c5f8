"""Figures as text, each always written the same way."""

from __future__ import annotations

from collections.abc import Mapping

from loadgen.reporting.units import MIB, three_digits

NOT_TOLD = "not told"
"""Where a server does not say."""


def milliseconds(seconds: float | None) -> str:
    """Such as 0.42, 12.3 and 4,567. Empty for None."""
    return "" if seconds is None else three_digits(1000 * seconds)


def mebibytes(amount: float | None) -> str:
    """Such as 1,024.5."""
    return NOT_TOLD if amount is None else f"{amount / MIB:,.1f}"


def share(part: float | None, whole: float) -> str:
    """Such as 12%; of nothing it is 0%."""
    if part is None:
        return NOT_TOLD
    return f"{part / whole:.0%}" if whole else "0%"


def counts(numbers: Mapping[str, int]) -> str:
    """Such as "RateLimited 3, Timeout 1"; "none" where all are 0."""
    return ", ".join(f"{name} {number:,}" for name, number in numbers.items() if number) or "none"


def duration(seconds: float) -> str:
    """Such as 4:05 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
