"""The measured copy bandwidth, beside what the link carries."""

from app.doctor.findings import Finding, error, ok, warning
from app.doctor.link import Link
from app.doctor.probe import Copies, CopyRates
from app.machine.units import MIB, rate

NAME = "copies"
BUFFER_BYTES = 256 * MIB
"""Larger than the caches, and than what a transfer needs to reach full speed."""
LEAST_BYTES = 16 * MIB
"""A copy of less says nothing about the link."""
LINK_SHARE = 0.7
"""Pinned copies reach 80 to 90 % of the link: packet headers take the rest."""
STEADY_SHARE = 0.7
"""Of the median, for the slowest of the copies. On a quiet machine it is above 0.9."""


def buffer_bytes(host_free: int, device_free: int) -> int:
    """As much as there is plenty of."""
    return min(BUFFER_BYTES, host_free // 8, device_free // 8)


def check_copies(copies: Copies | None, problem: str | None, link: Link | None) -> list[Finding]:
    """One line for each direction. `problem`: why nothing could be measured."""
    if copies is None:
        return [
            error(
                NAME,
                f"the copy bandwidth could not be measured: {problem}",
                "free memory on host and device; if there is enough, see nvidia-smi -q and dmesg for hardware errors",
            )
        ]
    return [_check("copy_to_device", copies.to_device, link), _check("copy_from_device", copies.from_device, link)]


def _check(name: str, measured: CopyRates, link: Link | None) -> Finding:
    summary = rate(measured.median)
    if link is not None:
        share = measured.median / link.bytes_per_second
        summary += f", {share:.0%} of the PCIe link"
        if share < LINK_SHARE:
            return warning(
                name,
                summary,
                "bind to the GPU's NUMA node (numa, above); stop what else copies; on bare metal, boot with iommu=pt",
            )
    if measured.slowest < STEADY_SHARE * measured.median:
        return warning(
            name,
            f"{summary}; unsteady, from {rate(measured.slowest)} to {rate(measured.fastest)}",
            "stop what else runs on the machine, then measure",
        )
    return ok(name, summary)
