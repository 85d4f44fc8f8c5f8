"""Sizes and rates as people read them."""

from __future__ import annotations

import pytest

from app.machine.units import GIB, MIB, rate, size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0.0 MiB"),
        (8 * MIB, "8.0 MiB"),
        (GIB - MIB, "1023.0 MiB"),
        (GIB, "1.0 GiB"),
        (79.1 * GIB, "79.1 GiB"),
        (-8 * MIB, "-8.0 MiB"),
        (-2 * GIB, "-2.0 GiB"),
    ],
)
def test_sizes(nbytes: float, text: str) -> None:
    assert size(nbytes) == text


def test_rates_are_in_powers_of_ten() -> None:
    assert rate(55.24e9) == "55.2 GB/s"
