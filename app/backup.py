"""`djinn backup`: a copy of a state folder, also while a server uses it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.domain.errors import FieldOutOfRange
from app.gpu.kv.disk import SUFFIX
from app.journal.copying import copy_journal
from app.journal.journal import FILE_NAME
from app.machine.units import size


def back_up(state_dir: Path, kv_dir: Path | None, target: Path) -> None:
    """Make `target`, which is empty or not there, a copy of `state_dir`, with the KV files in `kv_dir`, or without any.
    It is there whole, or not at all. Prints what is in it.

    Raises `FieldOutOfRange` if there is no journal, or if the copy cannot be made.
    """
    journal = state_dir / FILE_NAME
    if not journal.exists():
        raise FieldOutOfRange(f"there is no journal in {state_dir}; name the server's folder with --state-dir")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FieldOutOfRange(f"{target} is there already; name a folder that is not, or an empty one")
    with _becoming(target) as unnamed:
        sessions = copy_journal(journal, unnamed / FILE_NAME)
        files = [] if kv_dir is None else list(_take_files(kv_dir, unnamed / kv_dir.name))
    print(f"{target}: {sessions} sessions, KV of {len(files)} in {size(sum(files))}")


@contextmanager
def _becoming(target: Path) -> Iterator[Path]:
    """A folder that becomes `target` at the end of the block, unless the block fails. A `target` that is there may be
    the root of a disk, or all that can be written to: the folder is in it then, and its files move up, the journal
    last.
    """
    try:
        is_there = target.exists()
        parent = target if is_there else target.parent
        parent.mkdir(parents=True, exist_ok=True)
        unnamed = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=parent))
        try:
            yield unnamed
            if is_there:
                for each in sorted(unnamed.iterdir(), key=lambda each: each.name == FILE_NAME):
                    each.rename(target / each.name)
                unnamed.rmdir()
            else:
                unnamed.rename(target)
        except BaseException:
            shutil.rmtree(unnamed)
            raise
    except OSError as error:
        raise FieldOutOfRange(f"the backup {target} cannot be made: {error.strerror}") from error


def _take_files(folder: Path, target: Path) -> Iterator[int]:
    """Take the KV files of `folder` over to `target`; gives the size of each. The server writes a file under another
    name first and changes none afterwards: those with a name are whole, and can have a second one on the same disk.
    """
    target.mkdir(mode=0o700)
    for file in folder.glob(f"*{SUFFIX}"):
        copy = target / file.name
        try:
            _link_or_copy(file, copy)
        except FileNotFoundError:  # the server has deleted it meanwhile
            continue
        yield copy.stat().st_size


def _link_or_copy(file: Path, copy: Path) -> None:
    try:
        os.link(file, copy)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or one without links
        shutil.copyfile(file, copy)
