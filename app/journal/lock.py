"""One server per state folder."""

import fcntl
from pathlib import Path

from app.domain.errors import FieldOutOfRange
from app.machine.files import explain, make_writable


class FolderLock:
    """Holds `folder`, which is made if need be, until `close` or the end of the process, however that ends."""

    def __init__(self, folder: Path) -> None:
        """Raises `FieldOutOfRange` if another server holds the folder, or if it cannot be used."""
        try:
            make_writable(folder, 0o700)
            self._file = (folder / "lock").open("a")
        except OSError as error:
            raise FieldOutOfRange(
                f"cannot keep sessions in {folder}: {explain(error)}; name another folder with --state-dir",
                param="state_dir",
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise FieldOutOfRange(
                f"another server keeps its sessions in {folder}; give this one a folder of its own with --state-dir, "
                "or none to keep nothing",
                param="state_dir",
            ) from error

    def close(self) -> None:
        """Let go of the folder."""
        self._file.close()
