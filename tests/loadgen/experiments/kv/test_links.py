"""Links as they are given on the command line, and the loopback interface."""

from __future__ import annotations

import os
from typing import Any

import pytest

from loadgen.errors import LoadgenError
from loadgen.experiments.kv.links import NOMINAL_LINKS, Link, Loopback, time_loopback
from loadgen.experiments.kv.plan import KVPlan


def test_a_name_can_have_an_equals_sign_in_it() -> None:
    assert Link.parse("a=b=2.5") == Link("a=b", 2.5e9)


@pytest.mark.parametrize("text", ["wifi", "=1", "wifi=", "wifi=fast", "wifi=0", "wifi=-1", "wifi=inf", "wifi=nan"])
def test_what_is_no_link(text: str) -> None:
    with pytest.raises(LoadgenError, match="NAME=GB/s"):
        Link.parse(text)


def test_a_gigabit_is_an_eighth_of_a_gigabyte() -> None:
    assert NOMINAL_LINKS[0].seconds(125_000_000) == 1.0


def test_pcie_speeds_are_those_of_16_lanes() -> None:
    """Lanes times transfers per second, 128 of 130 bits being data, 8 bits a byte."""
    speeds = {link.name: link.bytes_per_s for link in NOMINAL_LINKS}
    for name, transfers in (("PCIe 4 x16", 16e9), ("PCIe 5 x16", 32e9)):
        assert speeds[name] == pytest.approx(16 * transfers * 128 / 130 / 8, rel=0.001)


def test_two_links_of_one_name() -> None:
    with pytest.raises(LoadgenError, match="a name of its own: a, a"):
        KVPlan(links=(Link("a", 1.0), Link("a", 2.0)))


@pytest.mark.parametrize(
    ("changed", "message"), [({"tokens": 31}, "tokens"), ({"repeats": 0}, "repeats"), ({"decoded": 0}, "decoded")]
)
def test_a_plan_out_of_range(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadgenError, match=f"{message} must be at least"):
        KVPlan(**changed)


def test_bytes_go_over_a_socket() -> None:
    found = time_loopback(os.urandom(3_000_001), 3)
    assert found.bytes == 3_000_001
    assert len(found.seconds) == 3
    assert all(0 < seconds < 10 for seconds in found.seconds)


def test_loopback_speed_is_that_of_the_median() -> None:
    assert Loopback(100, (1.0, 2.0, 50.0)).bytes_per_s == 50.0
