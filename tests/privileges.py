"""A folder as a user sees it whom the kernel refuses something: root writes to read-only files too."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def unprivileged_folder() -> Iterator[Path]:
    """A temporary folder, in a block in which this process has the rights of its owner and no more."""
    privileged = os.geteuid() == 0
    if privileged:
        os.seteuid(NOBODY)
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    finally:
        if privileged:
            os.seteuid(0)
