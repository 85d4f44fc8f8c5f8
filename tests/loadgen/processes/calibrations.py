"""Calibrations that need not be measured."""

from loadgen.processes.calibration import Calibration


def calibration(slow: str) -> Calibration:
    """One in which that type takes twice as long."""
    seconds: dict[str, tuple[float, ...]] = {
        dtype: (0.002, 0.02) if dtype == slow else (0.001, 0.01) for dtype in ("float32", "bfloat16")
    }
    return Calibration(("avx2",), "2.13.0", 2, 1536, 576, (1, 256), seconds)
