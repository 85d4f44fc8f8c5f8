"""How fast KV can travel: links by name and nominal speed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loadgen.errors import LoadgenError

GB = 1e9
"""Speeds are given in powers of ten, as vendors and networks do."""


@dataclass(frozen=True, slots=True)
class Link:
    """A way for bytes to go. `measured`: on this machine, in this run; else it is the nominal speed, one way."""

    name: str
    bytes_per_s: float
    measured: bool = False

    @classmethod
    def parse(cls, text: str) -> Link:
        """Read `NAME=GB/s`. Raises `LoadgenError`."""
        name, _, speed = text.rpartition("=")
        try:
            gb_per_s = float(speed)
        except ValueError:
            gb_per_s = math.nan
        if not name or not 0 < gb_per_s < math.inf:
            raise LoadgenError(f"--link is NAME=GB/s with a speed above 0, such as wifi=0.1, not {text!r}")
        return cls(name, gb_per_s * GB)

    def seconds(self, size: float) -> float:
        """How long `size` bytes take at this speed; latency is left out."""
        return size / self.bytes_per_s


NOMINAL_LINKS = (
    Link("1 GbE", 0.125 * GB),
    Link("10 GbE", 1.25 * GB),
    Link("100 GbE", 12.5 * GB),
    Link("PCIe 4 x16", 31.5 * GB),
    Link("PCIe 5 x16", 63.0 * GB),
    Link("NVLink 4", 450.0 * GB),
)
"""Line rates one way. PCIe: 16 lanes of 16 and 32 GT/s with 128b/130b encoding, before packet headers. NVLink 4: the 18
links of an H100, 900 GB/s both ways together, by NVIDIA's data sheet."""
