"""One server per state folder, as far as the file system's locks reach."""

import fcntl
import os
from pathlib import Path
from typing import IO

from app.domain.errors import FieldOutOfRange
from app.machine.files import explain, make_writable


class FolderLock:
    """Holds `folder`, which is made if need be, until `close` or the end of the process, however that ends."""

    def __init__(self, folder: Path) -> None:
        """Try to get hold of it. Raises `FieldOutOfRange` if it cannot be used."""
        self._folder = folder
        self._path = folder / "lock"
        self._file: IO[str] | None = None
        try:
            make_writable(folder, 0o700)
            self.try_again()
        except OSError as error:
            raise FieldOutOfRange(
                f"cannot keep sessions in {folder}: {explain(error)}; name another folder with --state-dir",
                param="state_dir",
            ) from error

    @property
    def is_held(self) -> bool:
        """Whether no other server has it. One that waited for the lease too may have put a file of its own in place of
        the one that is locked here.
        """
        try:
            return self._file is not None and os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except OSError:
            return False

    def try_again(self) -> None:
        """Get hold of it, unless another server has it. Raises `OSError` if there can be no such file."""
        self.close()
        file = self._path.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return
        self._file = file
        if not self.is_held:
            self.close()

    def replace(self) -> None:
        """Take the place of a holder that is out of reach, and whose lease is over: its lock may never end."""
        self._path.unlink(missing_ok=True)
        self.try_again()

    def refusal(self) -> FieldOutOfRange:
        """What to say if another server has it."""
        return FieldOutOfRange(
            f"another server keeps its sessions in {self._folder}, on this machine, though it may be frozen: end it, "
            "or give this one another folder with --state-dir, or none to keep nothing",
            param="state_dir",
        )

    def close(self) -> None:
        """Let go of the folder."""
        if self._file is not None:
            self._file.close()
            self._file = None
