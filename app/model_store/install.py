"""Putting a model folder in place at once: it is absent or whole, even if others pull, or the process is killed."""

import fcntl
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from app.domain.errors import DjinnError
from app.machine.files import is_full, make_writable, size


class ModelStoreError(DjinnError, code="model_unavailable"):
    """The model could not be made ready: its download failed or is damaged, or it cannot be converted faithfully."""


class BrokenModel(ModelStoreError):
    """A folder that Transformers cannot read."""


class StoreFull(ModelStoreError):
    """Not enough disk space."""


DAMAGED = OSError, ValueError, LookupError, TypeError, AttributeError, MemoryError, OverflowError, RecursionError
"""What reading a file raises whose content may be anything."""


def install_once(folder: Path, build: Callable[[Path], None]) -> bool:
    """Have `build` fill a scratch folder and rename it to `folder`, unless `folder` is there already.

    One process builds at a time; another one waits for it and then finds the result. The scratch folder is on
    the same file system, and one that a killed process left is cleared. Returns whether `build` ran. Raises
    StoreFull if the disk is full, ModelStoreError if the cache cannot be written to, and whatever `build` raises.
    """
    if folder.is_dir():
        return False
    try:
        make_writable(folder.parent)
    except OSError as error:
        raise ModelStoreError(
            f"cannot keep models in {folder.parent}: {error.strerror}; name another folder with DJINN_CACHE_DIR"
        ) from error
    with exclusively(folder.with_name(f".{folder.name}.lock")):
        if folder.is_dir():
            return False
        scratch = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            with disk_full_named(folder.parent):
                build(scratch)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return True


def require_free_space(folder: Path, needed: int) -> None:
    """Raise StoreFull unless the file system of `folder`, which must exist, has `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StoreFull(f"{folder} has {size(free)} free, and this needs {size(needed)}")


@contextmanager
def exclusively(path: Path) -> Iterator[None]:
    """An exclusive lock between processes and threads; the kernel drops it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def disk_full_named(folder: Path) -> Iterator[None]:
    """Within this context a full disk, which is that of `folder`, raises StoreFull."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise StoreFull(f"the disk of {folder} is full") from error
