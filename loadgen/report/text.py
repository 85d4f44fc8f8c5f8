"""Numbers, sizes, times and speeds as text, each always written the same way."""

from collections.abc import Mapping

MIB = 1 << 20
DIRECTIONS = {"out": "device to host", "in": "host to device", "to_disk": "host to disk", "from_disk": "disk to host"}
"""What Djinn's own names mean, by which KV moves."""


def number(value: float, *, ratio: bool = False, whole: bool = False) -> str:
    """As many digits as count: three of a ratio behind the point. `whole`: a bound that somebody has chosen."""
    if float(value).is_integer() and (whole or not ratio or abs(value) >= 1000):
        return f"{value:,.0f}"
    if whole:
        return f"{value:g}"
    if ratio or abs(value) < 1:
        return f"{value:.3f}"
    return f"{value:.2f}" if abs(value) < 100 else f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}"


def three_digits(value: float) -> str:
    """Such as 0.42, 12.3 and 4,567: no more of them count."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def in_bytes(size: float) -> str:
    """In powers of two."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{three_digits(size)} {unit}"
        size /= 1024
    return f"{three_digits(size)} TiB"


def in_seconds(seconds: float) -> str:
    """In microseconds, milliseconds or seconds."""
    for unit, factor in (("µs", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{three_digits(seconds * factor)} {unit}"
    return f"{three_digits(seconds)} s"


def in_speed(bytes_per_s: float) -> str:
    """In powers of ten, as links are sold."""
    for unit, factor in (("kB/s", 1e-3), ("MB/s", 1e-6)):
        if bytes_per_s * factor < 1000:
            return f"{three_digits(bytes_per_s * factor)} {unit}"
    return f"{three_digits(bytes_per_s * 1e-9)} GB/s"


def milliseconds(seconds: float | None) -> float | None:
    """None stays None."""
    return None if seconds is None else 1000 * seconds


def counts(numbers: Mapping[str, int]) -> str:
    """Such as "RateLimited 3, Timeout 1"; "none" where all are 0."""
    return ", ".join(f"{name} {number:,}" for name, number in numbers.items() if number) or "none"


def duration(seconds: float) -> str:
    """Such as 4:05 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
