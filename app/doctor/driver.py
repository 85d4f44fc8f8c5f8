"""The NVIDIA driver, and whether it is new enough for this PyTorch."""

from dataclasses import dataclass
from pathlib import Path

from app.doctor.findings import Finding, error, ok
from app.machine.files import read

NAME = "driver"


@dataclass(frozen=True, slots=True)
class Driver:
    """release: of the kernel module, where it is told. cuda: the newest CUDA it can run, None without a driver."""

    release: str | None
    cuda: str | None


def read_release(root: Path) -> str | None:
    """Of the kernel module, such as "580.159.04"; a sandbox may hide it."""
    return read(root / "sys/module/nvidia/version")


def check_driver(driver: Driver, torch_cuda: str | None) -> Finding:
    """`torch_cuda`: the version that PyTorch is built for. Within one major version an older driver will do
    (CUDA Compatibility, "Minor Version Compatibility").
    """
    if driver.cuda is None:
        return error(
            NAME,
            "there is none that answers (libcuda.so.1)",
            "install the NVIDIA driver; start a container with --gpus all (NVIDIA container toolkit)",
        )
    summary = f"{driver.release or 'of unknown release'}, for CUDA {driver.cuda}"
    if torch_cuda is not None and _major(driver.cuda) < _major(torch_cuda):
        return error(
            NAME,
            f"{summary}; PyTorch needs one for CUDA {torch_cuda}",
            f"update the driver, or install a PyTorch for CUDA {_major(driver.cuda)}",
        )
    return ok(NAME, summary)


def _major(version: str) -> int:
    return int(version.partition(".")[0])
