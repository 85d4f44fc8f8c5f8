from __future__ import annotations

import pytest

from app.doctor.findings import Status
from app.doctor.link import Link, check_link, read_link
from tests.doctor.machines import ADDRESS, Kernel


@pytest.mark.parametrize(("speed", "gigabytes"), [(2.5, 4.0), (5.0, 8.0), (8.0, 15.75), (16.0, 31.5), (32.0, 63.0)])
def test_sixteen_lanes_carry_what_the_standard_says(speed: float, gigabytes: float) -> None:
    assert Link(speed, 16, speed, 16).bytes_per_second / 1e9 == pytest.approx(gigabytes, rel=1e-3)


def test_a_link_that_runs_as_its_card_can_is_well(kernel: Kernel) -> None:
    kernel.card()
    finding = check_link(read_link(kernel.root, ADDRESS))
    assert (finding.status, finding.summary) == (Status.OK, "32 GT/s x16, 63.0 GB/s each way")


@pytest.mark.parametrize("link", ["32.0 8", "16.0 16", "2.5 1"])
def test_a_link_below_what_its_card_can_is_a_warning(kernel: Kernel, link: str) -> None:
    kernel.card(link=link)
    finding = check_link(read_link(kernel.root, ADDRESS))
    assert finding.status is Status.WARNING
    assert "the card can do 32 GT/s x16" in finding.summary
    assert finding.remedy is not None
    assert "slot" in finding.remedy


@pytest.mark.parametrize("link", ["Unknown 16", "32.0 0"])
def test_a_virtual_machine_need_not_tell(kernel: Kernel, link: str) -> None:
    kernel.card(link=link)
    assert read_link(kernel.root, ADDRESS) is None
    assert read_link(kernel.root, "0000:99:00.0") is None
    assert check_link(None).status is Status.OK
