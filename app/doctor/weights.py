"""The copies of streamed weights: whether every byte is what was stored."""

from pathlib import Path

from app.doctor.findings import Finding, error, ok
from app.domain.errors import WeightsLost
from app.gpu.weights.file import REMEDY, WeightFile
from app.gpu.weights.layout import UnusableFile
from app.machine.units import size

NAME = "weights"


def check_weights(folder: Path) -> list[Finding]:
    """One line for each file of weights in `folder`, which is read wholly: 140 GB take minutes."""
    found = [_check(path) for path in sorted(folder.glob("*.safetensors"))]
    return found or [ok(NAME, f"there are no copies of streamed weights in {folder}")]


def _check(path: Path) -> Finding:
    try:
        file = WeightFile(path)
    except (UnusableFile, OSError) as problem:
        return error(NAME, f"{path} cannot be used: {problem}", REMEDY)
    try:
        file.check()
    except WeightsLost as lost:
        return error(NAME, lost.message.removesuffix(f". {REMEDY}"), REMEDY)
    finally:
        file.close()
    return ok(NAME, f"{path} is whole, {size(path.stat().st_size)}")
