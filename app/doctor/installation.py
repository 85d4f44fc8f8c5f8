"""What `djinn --version` says: what is installed, and what it would serve with."""

from app.doctor.device import choose_device
from app.doctor.host import TORCH, read_versions
from app.doctor.probe import MachineProbe, newest_cuda
from app.domain.values import AUTO_DTYPES
from app.settings import Settings


def describe_installation(settings: Settings) -> str:
    """A line with Djinn's version, and one for each of the other facts.

    Raises `FieldOutOfRange` if the settings ask for something that is no device.
    """
    versions = read_versions()
    # PyTorch, which counts GPUs, takes seconds to load, and finds none where there is no driver.
    counts = settings.device == "auto" and newest_cuda() is not None
    device = choose_device(settings.device, MachineProbe().build().gpu_count if counts else 0)
    facts = {
        "djinn": versions.djinn,
        "models": settings.cache_dir.expanduser(),
        "device": device,
        "dtype": AUTO_DTYPES[device.partition(":")[0]] if settings.dtype == "auto" else settings.dtype,
        "python": versions.python,
        TORCH: versions.packages[TORCH].installed,
    }
    return "\n".join(f"{name} {fact}" for name, fact in facts.items())
