"""Sizes, times and speeds in words."""

from __future__ import annotations

import pytest

from loadgen.results.text import in_bytes, in_seconds, in_speed


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.00 KiB"),
        (46080, "45.0 KiB"),
        (3 << 30, "3.00 GiB"),
        (2**51, "2,048 TiB"),
    ],
)
def test_bytes(size: int, text: str) -> None:
    assert in_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.5e-7, "0.15 µs"), (2.5e-3, "2.50 ms"), (0.999, "999 ms"), (1.0, "1.00 s"), (3600, "3,600 s")],
)
def test_seconds(seconds: float, text: str) -> None:
    assert in_seconds(seconds) == text


@pytest.mark.parametrize(("speed", "text"), [(5e3, "5.00 kB/s"), (1.25e8, "125 MB/s"), (4.5e11, "450 GB/s")])
def test_speeds(speed: float, text: str) -> None:
    assert in_speed(speed) == text
