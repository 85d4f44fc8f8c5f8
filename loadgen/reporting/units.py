"""Sizes, times and speeds as people read them."""

from __future__ import annotations

MIB = 1 << 20


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
