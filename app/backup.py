"""`djinn backup`: a copy of a state folder, also while a server uses it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from app.domain.errors import FieldOutOfRange
from app.gpu.kv.file import SUFFIX
from app.journal.journal import FILE_NAME
from app.journal.migrations import copy_journal
from app.machine.files import counted, explain, size, sync

UPLOADS, UPLOAD = "uploads", ".safetensors"
"""The folder of uploads, and how a whole one ends."""
ENDING = (signal.SIGTERM, signal.SIGHUP)


def back_up(state_dir: Path, kv_dir: Path | None, target: Path) -> None:
    """Make `target`, which is empty or not there, a copy of `state_dir`: its journal and uploads, with the KV files in
    `kv_dir`, or without any. It is there whole, or not at all, and a power cut does not change that. Prints what is in
    it.

    Raises `FieldOutOfRange` if there is no journal, or if the copy cannot be made.
    """
    try:
        sessions, uploads, sizes = _back_up(state_dir, kv_dir, target)
    except OSError as error:
        at = f"{error.filename}: " if error.filename else ""
        raise FieldOutOfRange(f"the backup {target} cannot be made: {at}{explain(error)}") from error
    more = f"; {counted(len(uploads), 'upload')} in {size(sum(uploads.values()))}" if uploads else ""
    print(f"{target}: {counted(sessions, 'session')}, KV of {len(sizes)} in {size(sum(sizes))}{more}")


def _back_up(state_dir: Path, kv_dir: Path | None, target: Path) -> tuple[int, dict[str, int], list[int]]:
    """How many sessions are in the copy, and the sizes of its uploads and its KV files. Raises `OSError` too."""
    journal, uploads = state_dir / FILE_NAME, state_dir / UPLOADS
    if not _is_there(journal):
        raise FieldOutOfRange(f"there is no journal in {journal.parent}; name the server's folder with --state-dir")
    if _is_there(target) and not (target.is_dir() and not any(target.iterdir())):
        raise FieldOutOfRange(f"{target} is there already; name a folder that is not, or an empty one")
    with _ending_cleanly(), _becoming(target) as unnamed:
        # Those of before and after the journal's moment: it may name any of them. A server deletes what it does not.
        kept = dict(_take_files(uploads, unnamed / UPLOADS, UPLOAD))
        sessions = copy_journal(journal, unnamed / FILE_NAME)
        kept |= _take_files(uploads, unnamed / UPLOADS, UPLOAD)
        if kv_dir is None:
            return sessions, kept, []
        (unnamed / kv_dir.name).mkdir(mode=0o700)
        return sessions, kept, [size for _, size in _take_files(kv_dir, unnamed / kv_dir.name, SUFFIX)]


def _is_there(path: Path) -> bool:
    """Raises `OSError` if that cannot be seen: some versions of Python call such a path missing."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


@contextmanager
def _ending_cleanly() -> Iterator[None]:
    """A signal that would end the process ends the block as Ctrl-C does: what it has begun is removed. Where such a
    signal is ignored or handled, it still is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python takes signals in the main thread alone
        return

    def end(number: int, _: FrameType | None) -> None:
        sys.exit(128 + number)

    before = {each: signal.signal(each, end) for each in ENDING if signal.getsignal(each) is signal.SIG_DFL}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def _becoming(target: Path) -> Iterator[Path]:
    """A folder that becomes `target` at the end of the block, unless the block fails. A `target` that is there may be
    the root of a disk, or all that can be written to: the folder is in it then, and its files move up, the journal
    last.
    """
    is_there = target.exists()
    parent = target if is_there else target.parent
    parent.mkdir(parents=True, exist_ok=True)
    unnamed = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=parent))
    try:
        yield unnamed
        for path in (*unnamed.rglob("*"), unnamed):
            sync(path)
        if is_there:
            _move_up(unnamed)
        else:
            unnamed.rename(target)
        sync(parent)
    except BaseException:
        shutil.rmtree(unnamed, ignore_errors=True)
        raise


def _move_up(folder: Path) -> None:
    """Move what is in the folder beside it, and remove the folder. If that fails, nothing of it is beside it."""
    moved: list[Path] = []
    try:
        for each in sorted(folder.iterdir(), key=lambda each: each.name == FILE_NAME):
            each.rename(folder.parent / each.name)
            moved.append(folder.parent / each.name)
    except BaseException:
        for each in moved:
            each.rename(folder / each.name)
        raise
    folder.rmdir()


def _take_files(folder: Path, target: Path, suffix: str) -> Iterator[tuple[str, int]]:
    """Take the files of `folder` over to `target` that end so, unless they are there; gives the name and size of each.
    The server writes a file under another name first and changes none afterwards: those with a name are whole, and can
    have a second one on the same disk.
    """
    for file in _files(folder, suffix):
        target.mkdir(mode=0o700, exist_ok=True)
        copy = target / file.name
        try:
            if not copy.exists():
                _link_or_copy(file, copy)
        except FileNotFoundError:  # the server has deleted it meanwhile
            continue
        yield copy.name, copy.stat().st_size


def _files(folder: Path, suffix: str) -> list[Path]:
    """Those that there are now. Raises `OSError` if that cannot be seen, which `Path.glob` passes over."""
    try:
        return [file for file in folder.iterdir() if file.suffix == suffix]
    except FileNotFoundError:  # a server without KV on disk
        return []


def _link_or_copy(file: Path, copy: Path) -> None:
    try:
        os.link(file, copy)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or one without links
        shutil.copyfile(file, copy)
