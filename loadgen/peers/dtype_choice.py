"""The data type of servers that are started for a run: the one that is named, or the best of each."""

from dataclasses import dataclass

from loadgen.peers.base import ServerSettings
from loadgen.peers.cuda import on_cuda
from loadgen.peers.dtypes import AUTO
from loadgen.processes.calibration import Calibration, calibrate


@dataclass(frozen=True, slots=True)
class Choice:
    """A data type; `calibration` has the figures that chose it, None where nothing had to be measured."""

    dtype: str
    calibration: Calibration | None = None


def choose_dtype(settings: ServerSettings) -> Choice:
    """What a server made of PyTorch runs in: the type that is named, or else its fastest on this machine.

    Raises `LoadgenError` if that cannot be measured.
    """
    if settings.dtype != AUTO:
        return Choice(settings.dtype)
    if on_cuda():
        return Choice("bfloat16")
    calibration = calibrate(settings.model, len(settings.cores))
    return Choice(calibration.dtype, calibration)
