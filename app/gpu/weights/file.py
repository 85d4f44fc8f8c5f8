"""The file with the host's copy of a model's weights: written once, opened at each start, and checked.

A start reads the header alone, which has a digest of itself, and wants the size and the time that it says: the file
bears the time of its writing, and a change of the file changes that. Each part is compared with its checksum when it is
first used. `djinn doctor --weights` compares them all.

The server reads it with system calls, never through a mapping: if another program truncates a mapped file, the next
look at it ends the server. Here a read comes up short, and a turn fails with the reason.
"""

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange, WeightsLost
from app.gpu.device.hardware import PROGRESS_SECONDS
from app.gpu.state.kv_header import LENGTH_BYTES
from app.gpu.weights.arena import aligned
from app.gpu.weights.layout import (
    BundleLayout,
    UnusableFile,
    WeightLayout,
    Write,
    encode_header,
    host_bytes,
    read_header,
    sections_of,
)
from app.machine.files import size, sync
from app.model_store.install import disk_full_named, exclusively, require_free_space

logger = logging.getLogger(__name__)

_MAX_HEADER_BYTES = 100_000_000
"""As the safetensors library has it."""
_CLOCK_NS = 2_000_000_000
"""The coarsest clock that file systems have. A file that changed so lately can change again and bear the same time."""
_SCRATCH_BYTES = 1 << 20
_SAMPLES = 3
"""Places of a run of bytes that are looked at: what is read at once is dropped in large parts too."""
_mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)
if _mincore is not None:
    _mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

REMEDY = "Delete the file and start the server again: the server then writes it again"

State = tuple[int, int, int]
"""What changes with a file's content: its size, and the times of its last change, of its content and of anything, in
nanoseconds. A write changes both times, and only the first one can be set back.
"""


class WeightFile:
    """The open file. A part is proven while the file has not changed since its checksum was compared.

    The descriptor is the file, whatever becomes of its name. Any thread may call, but one at a time for a part.
    """

    def __init__(self, path: Path) -> None:
        """Raises `UnusableFile` if it is none that Djinn wrote, `OSError`. Reads the header alone."""
        self.path = path
        with ExitStack() as opened:
            self._file = opened.enter_context(path.open("rb", buffering=0))
            lead = self._read_lead()
            self.model, self.layout, checksums, written = read_header(lead)
            self.sections, needed = sections_of(self.model, self.layout)
            found = os.fstat(self._file.fileno())
            if found.st_size != needed:
                raise UnusableFile(f"it has {found.st_size} bytes, its header says {needed}")
            self.written_ns = written * 10**9
            self.is_as_written = found.st_mtime_ns == self.written_ns
            """Whether it bears the time of its writing: it is neither a copy, nor was it changed."""
            # The system reads ahead for each descriptor as it has been read until now. With one for both, a row of a
            # table between the bundles costs a pass that comes from the disk a tenth of its time.
            self._rows = opened.enter_context(path.open("rb", buffering=0))
            if not os.path.samestat(found, os.fstat(self._rows.fileno())):
                raise UnusableFile("it has been replaced while it was opened")
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._rows.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            mapped = opened.enter_context(mmap.mmap(self._file.fileno(), needed, access=mmap.ACCESS_READ))
            self._mapped_at = int(np.frombuffer(mapped, np.uint8).ctypes.data)
            self.close = opened.pop_all().close
            """Nothing is read any more."""
        self._checksums = dict(zip(self.sections, checksums, strict=True))
        self._proven: dict[str, State] = {}

    def state(self) -> State | None:
        """As of now; None if a change after this might not show."""
        try:
            found = os.fstat(self._file.fileno())
            # A change shows when a program begins to make it: a change under way may bear a time long past.
            written = has_writers(self._file.fileno())
        except (OSError, ValueError) as error:  # ValueError: it is closed
            raise WeightsLost(f"Djinn cannot look at {self.path}: {error}") from error
        age = time.time_ns() - found.st_ctime_ns  # to set the other time, also to one to come, changes this one
        return _state(found) if age > _CLOCK_NS and not written else None

    def fileno(self) -> int:
        """The descriptor, for reads at an offset."""
        return self._file.fileno()

    def is_cached(self, name: str) -> bool:
        """Whether the system has the part in memory, as far as samples of it tell. False where the file is not mapped
        any more, or a system has no such call; true, on Linux, of all files that belong to others.

        The mapping is never touched: nothing is read by asking. The other way to ask is a read that is not to wait,
        which the system takes as a wish: it begins to read there, in between the reads from first to last.
        """
        if _mincore is None:
            return False
        part, seen = self.sections[name], ctypes.c_ubyte()
        for number in range(_SAMPLES):
            at = part.offset + (part.nbytes - 1) * number // (_SAMPLES - 1)
            page = self._mapped_at + at // mmap.PAGESIZE * mmap.PAGESIZE
            if _mincore(page, 1, ctypes.byref(seen)) != 0 or not seen.value & 1:
                return False
        return True

    def read(self, name: str, start: int, into: memoryview, *, scattered: bool = False) -> None:
        """Fill `into` with the part's bytes from `start` on, or raise `WeightsLost`; `scattered`: a little here and
        there. They are what was stored only if the part `is_proven` to have stood still, or they are themselves.
        """
        file = self._rows if scattered else self._file
        offset, done = self.sections[name].offset + start, 0
        while done < len(into):
            try:
                count = os.preadv(file.fileno(), [into[done:]], offset + done)
                if not count:
                    raise self.lost(name, f"the file ends at byte {os.fstat(file.fileno()).st_size}")
            except (OSError, ValueError) as error:
                raise self.lost(name, str(error)) from error
            done += count

    def parts(self, name: str) -> Iterator[tuple[int, memoryview]]:
        """All of the part, piece by piece in the same memory, with its first byte's place. Raises `WeightsLost`."""
        nbytes = self.sections[name].nbytes
        scratch = memoryview(bytearray(min(_SCRATCH_BYTES, nbytes)))
        for start in range(0, nbytes, _SCRATCH_BYTES):
            part = scratch[: nbytes - start]
            self.read(name, start, part)
            yield start, part

    def is_proven(self, name: str, before: State | None) -> bool:
        """Whether what was read of the part since `before` is what was stored."""
        return before is not None and before == self._proven.get(name) == self.state()

    def is_intact(self, name: str) -> bool:
        """Whether what has been read of the part since it was proven was stored. Asked often, so without `state`."""
        try:
            return name in self._proven and _state(os.fstat(self._file.fileno())) == self._proven[name]
        except (OSError, ValueError):
            return False

    def prove(self, name: str, checksum: int, before: State | None) -> None:
        """Compare the checksum of all of the part, read since `before`; `WeightsLost` if it is another.

        If the file has stood still since `before`, and a change since then would show, the part is proven.
        """
        if checksum != self._checksums[name]:
            raise self.lost(name, "its checksum does not match its content")
        if before is not None and self.state() == before:
            self._proven[name] = before

    def check(self) -> None:
        """Read all of the file, in as many threads as PyTorch has. Raises `WeightsLost` if a part is damaged."""

        def check(name: str) -> int:
            before, checksum = self.state(), 0
            for _, part in self.parts(name):
                checksum = zlib.crc32(part, checksum)
            self.prove(name, checksum, before)
            return self.sections[name].nbytes

        tell = _progress("checked", sum(part.nbytes for part in self.sections.values()))
        with ThreadPoolExecutor(torch.get_num_threads(), "djinn-weights-check") as pool:
            for nbytes in pool.map(check, self.sections):
                tell(nbytes)

    def lost(self, name: str, reason: str) -> WeightsLost:
        """The error that says so."""
        return WeightsLost(f"{name} of the weights in {self.path} is lost: {reason}. {REMEDY}")

    def _read_lead(self) -> bytes:
        """The bytes before the tensors."""
        start = os.pread(self._file.fileno(), LENGTH_BYTES, 0)
        length = int.from_bytes(start, "little")
        if not 0 < length <= min(_MAX_HEADER_BYTES, os.fstat(self._file.fileno()).st_size - LENGTH_BYTES):
            raise UnusableFile("it does not begin with the length of its header")
        return start + os.pread(self._file.fileno(), length, LENGTH_BYTES)


def _state(found: os.stat_result) -> State:
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def open_weight_file(path: Path, model: str, layout: WeightLayout, fill: Callable[[Write], None]) -> WeightFile:
    """The file `path` with the weights of `model`, which `fill` writes if it is not there, or is for something else.

    `model` stands for the weights and the type that they are for: two files of the same `model` and `layout` differ in
    nothing. One that does not bear the time of its writing is read wholly: `WeightsLost` if it is damaged. One process
    writes at a time; another one waits for it and then finds the file. Raises StoreFull, FieldOutOfRange if the file
    cannot be read or made, and whatever `fill` raises.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusively(path.with_name(f".{path.name}.lock")):
            file = _open_usable(path, model, layout)
            if file is None:
                path.unlink(missing_ok=True)  # there may be no room for both; a server goes on with the old one
                _write_file(path, model, layout, fill)
                file = WeightFile(path)
            return file
    except OSError as error:
        raise FieldOutOfRange(
            f"Djinn cannot write its copy of the weights to {path}: {error}", param="cache_dir"
        ) from error


def _open_usable(path: Path, model: str, layout: WeightLayout) -> WeightFile | None:
    needed = size(sections_of(model, layout)[1])
    with ExitStack() as opened:
        try:
            file = WeightFile(path)
            opened.callback(file.close)
            if file.model != model:
                raise UnusableFile(f"it is of the model {file.model!r}, not {model!r}")
            if file.layout != layout:
                raise UnusableFile("its bundles and tables are laid out in another way")
        except FileNotFoundError:
            logger.info("writing %s of weights to %s, once", needed, path)
            return None
        except UnusableFile as error:
            logger.warning("%s is not used: %s; writing it again, %s", path, error, needed)
            return None
        if not file.is_as_written:
            logger.warning("%s does not bear the time of its writing: reading all of it, %s", path, needed)
            before = file.state()
            file.check()
            if before is not None and before == file.state():
                _set_time(path, file.written_ns)
        opened.pop_all()
        return file


def _set_time(path: Path, time_ns: int) -> None:
    """Have the next start trust the file."""
    try:
        os.utime(path, ns=(time_ns, time_ns))
    except OSError as error:
        logger.warning("%s is read wholly at each start: its time cannot be set: %s", path, error)


def _write_file(path: Path, model: str, layout: WeightLayout, fill: Callable[[Write], None]) -> None:
    """Write the file beside `path`, and rename it to `path` when it is whole; else nothing is left of it. Raises
    StoreFull, with both sizes before anything is written if the disk is too small then, and ValueError if something was
    not written, or is not laid out as was said.

    The checksum is zlib's CRC-32: sure to find one flipped bit and any burst of 32, it reads 4 GB/s on one core without
    special instructions, where SHA-256 with them reads 1.8 and BLAKE2b 0.9.
    """
    sections, nbytes = sections_of(model, layout)
    known, checksums = layout.parts(), dict[str, int]()
    tell = _progress("written", nbytes)
    scratch = path.with_name(f".{path.name}.partial")
    scratch.unlink(missing_ok=True)
    require_free_space(path.parent, nbytes)
    try:
        with disk_full_named(path.parent), scratch.open("wb") as file:

            def write(name: str, tensors: Sequence[Tensor]) -> None:
                if BundleLayout.of(tensors) != known[name]:
                    raise ValueError(f"{name} is not laid out as was said")
                checksum, section = 0, sections[name]
                end = section.offset + section.nbytes
                file.seek(section.offset)
                for tensor in tensors:
                    content = host_bytes(tensor.cpu())
                    for part in (content, memoryview(bytes(aligned(len(content)) - len(content)))):
                        part = part[: end - file.tell()]
                        checksum = zlib.crc32(part, checksum)
                        file.write(part)
                tell(section.nbytes)
                checksums[name] = checksum

            file.truncate(nbytes)  # zeros wherever nothing is written
            fill(write)
            missing = sorted(sections.keys() - checksums.keys())
            if missing:
                raise ValueError(f"never written: {', '.join(missing)}")
            written = int(time.time()) // 2 * 2  # as coarse as the coarsest file system has it
            header = encode_header(model, layout, [checksums[name] for name in sections], written)
            file.seek(0)
            file.write(header)
            file.flush()
            os.fsync(file.fileno())
        _set_time(scratch, written * 10**9)
        scratch.rename(path)
        sync(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


def _progress(done: str, total: int) -> Callable[[int], None]:
    """What logs, every few seconds, how many of `total` bytes are `done`, say "written". It is called with new ones."""
    count, told = 0, time.perf_counter()

    def tell(nbytes: int) -> None:
        nonlocal count, told
        count += nbytes
        if time.perf_counter() - told > PROGRESS_SECONDS:
            told = time.perf_counter()
            logger.info("%s %s of %s of weights", done, size(count), size(total))

    return tell


def has_writers(file: int) -> bool:
    """Whether a process has the file open for writing, or mapped so, of which `file` is a descriptor for reading.

    A read lease is granted only if none has (fcntl(2), "Leases"). It is given back at once: a process that opens the
    file in between waits that long, and we are sent a signal that is ignored. False where there are no leases.
    """
    try:
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except (OSError, AttributeError) as error:
        return isinstance(error, OSError) and error.errno == errno.EAGAIN
    with suppress(OSError):  # another thread has given back the lease of us both
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False
