"""The PCIe link of the GPU: what copies to it can reach at most."""

import re
from dataclasses import dataclass
from pathlib import Path

from app.doctor.findings import Finding, ok, warning
from app.machine.files import read
from app.machine.units import rate

NAME = "pcie_link"


@dataclass(frozen=True, slots=True)
class Link:
    """Gigatransfers per second and lane, and lanes: as it runs, and the most that the card can do."""

    speed: float
    width: int
    max_speed: float
    max_width: int

    @property
    def bytes_per_second(self) -> float:
        """Payload each way: 8 bits travel as 10 up to 5 GT/s, then 128 as 130 (PCI Express Base Specification 3.0,
        4.2); from 64 GT/s on a few percent less than that gives.
        """
        return self.speed * 1e9 * self.width / 8 * (0.8 if self.speed < 8 else 128 / 130)


def read_link(root: Path, pci_address: str) -> Link | None:
    """None where the machine does not tell, as many virtual ones. An idle link sleeps: read it right after a copy."""
    folder = root / "sys/bus/pci/devices" / pci_address
    names = ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
    numbers = [re.match(r"\d+(?:\.\d+)?", read(folder / name) or "") for name in names]
    speed, width, max_speed, max_width = (float(number[0]) if number else 0.0 for number in numbers)
    if not (speed and width and max_speed and max_width):
        return None
    return Link(speed, int(width), max_speed, int(max_width))


def check_link(link: Link | None) -> Finding:
    """Whether it runs as wide and as fast as the card can."""
    if link is None:
        return ok(NAME, "the machine does not tell")
    summary = f"{link.speed:g} GT/s x{link.width}, {rate(link.bytes_per_second)} each way"
    if (link.speed, link.width) == (link.max_speed, link.max_width):
        return ok(NAME, summary)
    return warning(
        NAME,
        f"{summary}; the card can do {link.max_speed:g} GT/s x{link.max_width}",
        "use a slot with all lanes of the processor, look for a limit in the firmware, reseat the card or its riser",
    )
