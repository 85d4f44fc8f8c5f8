"""GPUs: the figures of their data sheets, and what was measured of them elsewhere. Nothing of it was measured here."""

from __future__ import annotations

from dataclasses import dataclass

LAUNCH_S = 1.3e-6
"""Of each kernel in a replayed graph, while nothing useful is done. Measured with empty kernels on an H100, as others
quote it (Spector et al., "Look Ma, No Bubbles! Designing a Low-Latency Megakernel for Llama-1B", Hazy Research, 2025).
"""
PROCESSORS = 132
"""Multiprocessors of an H100 SXM, and of an H200."""


@dataclass(frozen=True, slots=True)
class Device:
    """`flops_per_s` are those of bfloat16 on tensor cores with dense matrices; a data sheet prints twice as many, for
    sparse ones. `measured_bytes_per_s`: what of `bytes_per_s` has been seen; None: no figure is known.
    """

    name: str
    bytes_per_s: float
    flops_per_s: float
    measured_bytes_per_s: float | None = None

    @property
    def usable_bytes_per_s(self) -> float:
        """What has been measured, else the data sheet's."""
        return self.measured_bytes_per_s or self.bytes_per_s

    @property
    def origin(self) -> str:
        """Where `usable_bytes_per_s` comes from."""
        return "data sheet" if self.measured_bytes_per_s is None else "measured elsewhere"


H100 = Device("H100 SXM", 3.35e12, 989.4e12)
"""NVIDIA H100 Tensor Core GPU data sheet: 3.35 TB/s, 1,979 TFLOPS of bfloat16 with sparsity; 989.4 without and 132
multiprocessors are in the architecture's white paper."""
H200 = Device("H200", 4.8e12, 989.4e12, measured_bytes_per_s=4.3e12)
"""NVIDIA H200 Tensor Core GPU data sheet: 4.8 TB/s, and the processors of the H100. 4.3 TB/s were measured on one."""
DEVICES = (H100, H200)
