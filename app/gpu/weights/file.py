"""A model's bundles and tables in one safetensors file, and what shows that it still holds what was stored.

    8 bytes    length of the header, little-endian
    header     JSON, padded to a page: each tensor's dtype, shape and place; `__metadata__` says what they belong to
    table.0    [rows, width]; and so on, each from a new page on
    bundle.0   U8 [nbytes], laid out as `BundleLayout` says; and so on, in the order of use

The server reads it with system calls, never through a mapping. If another program truncates a mapped file, the next
look at it is a SIGBUS, which ends the server. Here a read comes up short, and a turn fails with the reason.
"""

import os
import time
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

from app.domain.errors import WeightsLost
from app.gpu.weights.header import (
    BundleContents,
    BundleFileUnusable,
    Section,
    file_bytes,
    match_header,
    sections_of,
)
from app.gpu.weights.page_cache import Residency, has_writers

_MAX_HEADER_BYTES = 100_000_000
"""As the safetensors library has it."""
_CLOCK_NS = 2_000_000_000
"""The coarsest clock that file systems have. A file that changed so lately can change again and bear the same time."""
_SCRATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileState:
    """What changes with the file's content: whoever writes changes both times, and can set only the first one back."""

    size: int
    modified_ns: int
    changed_ns: int
    settled: bool = field(compare=False)
    """Whether a change after this would show."""

    @property
    def seen(self) -> tuple[int, int, int]:
        """What there is to compare."""
        return self.size, self.modified_ns, self.changed_ns


class BundleFile:
    """The open file. A section is proven while the file has not changed since its checksum was compared.

    The descriptor is the file, whatever becomes of its name. Any thread may call, but one at a time for a section.
    """

    def __init__(self, path: Path, contents: BundleContents) -> None:
        """Raises `BundleFileUnusable` if it has not the `contents`, `OSError`. Checksums are not compared."""
        self.path = path
        self.contents = contents
        with ExitStack() as opened:
            self._file = opened.enter_context(path.open("rb", buffering=0))
            checksums = match_header(self._read_lead(), contents)
            self.sections = sections_of(contents)
            if self.state().size != file_bytes(contents):
                raise BundleFileUnusable(f"it has {self.state().size} bytes, its header says {file_bytes(contents)}")
            self._rows = opened.enter_context(_open_again(self._file, path))
            self._residency = opened.enter_context(closing(Residency(self._file.fileno(), file_bytes(contents))))
            self.close = opened.pop_all().close
            """Nothing is read any more."""
        self._checksums = {section.name: found for section, found in zip(self.sections, checksums, strict=True)}
        self._proven: dict[str, FileState] = {}
        self.tables = self.sections[: len(contents.tables)]
        self.bundles = self.sections[len(contents.tables) :]

    def state(self) -> FileState:
        """As of now."""
        try:
            found = os.fstat(self._file.fileno())
            # A change shows when a program begins to make it: one that is under way may bear a time long past.
            written = has_writers(self._file.fileno())
        except (OSError, ValueError) as error:  # ValueError: it is closed
            raise WeightsLost(f"Djinn cannot look at {self.path}: {error}") from error
        age = time.time_ns() - found.st_ctime_ns  # whoever sets the other time, also to one to come, changes this one
        return FileState(found.st_size, found.st_mtime_ns, found.st_ctime_ns, age > _CLOCK_NS and not written)

    def fileno(self) -> int:
        """The descriptor, for reads at an offset."""
        return self._file.fileno()

    def is_cached(self, section: Section) -> bool:
        """Whether the system has the section in memory, as far as samples of it tell."""
        return self._residency.holds(section.offset, section.nbytes)

    def read(self, section: Section, start: int, into: memoryview) -> None:
        """Fill `into` with the section's bytes from `start` on. Raises `WeightsLost` if they are not there.

        They are what was stored only if the section `is_proven` to have stood still, or they are proven themselves.
        """
        self._read(self._file, section, start, into)

    def read_rows(self, section: Section, start: int, into: memoryview) -> None:
        """As `read`, a little here and there, through a descriptor of its own: the system reads ahead for each as it
        has been read until now. With one for both, a row of a table between the bundles costs a pass that comes from
        the disk a tenth of its time.
        """
        self._read(self._rows, section, start, into)

    def _read(self, file: FileIO, section: Section, start: int, into: memoryview) -> None:
        done = 0
        while done < len(into):
            try:
                count = os.preadv(file.fileno(), [into[done:]], section.offset + start + done)
            except (OSError, ValueError) as error:
                raise self.lost(section, str(error)) from error
            if not count:
                raise self.lost(section, f"the file ends at byte {self.state().size}")
            done += count

    def checksum(self, section: Section) -> int:
        """Of what the section holds now. Raises `WeightsLost` if it cannot be read."""
        found = 0
        for _, part in self.parts(section):
            found = zlib.crc32(part, found)
        return found

    def parts(self, section: Section) -> Iterator[tuple[int, memoryview]]:
        """All of the section from first to last, each part with its first byte's place in the section. A part is there
        until the next one is asked for. Raises `WeightsLost` if it cannot be read.
        """
        scratch = memoryview(bytearray(min(_SCRATCH_BYTES, section.nbytes)))
        for start in range(0, section.nbytes, _SCRATCH_BYTES):
            part = scratch[: section.nbytes - start]
            self.read(section, start, part)
            yield start, part

    def is_proven(self, section: Section, before: FileState) -> bool:
        """Whether what was read of the section since `before` is what was stored."""
        return before == self._proven.get(section.name) == self.state()

    def is_intact(self, section: Section) -> bool:
        """Whether what has been read of the section, since it was proven, is what was stored. Asked after each product,
        and so without what `state` takes its time for.
        """
        proven = self._proven.get(section.name)
        if proven is None:
            return False
        try:
            found = os.fstat(self._file.fileno())
        except (OSError, ValueError):
            return False
        return (found.st_size, found.st_mtime_ns, found.st_ctime_ns) == proven.seen

    def prove_copy(self, section: Section, copy: memoryview, before: FileState) -> None:
        """Make sure that `copy`, read since `before`, is all of the section. Raises `WeightsLost`."""
        if not self.is_proven(section, before):
            self.prove(section, zlib.crc32(copy), before)

    def prove(self, section: Section, checksum: int, before: FileState) -> None:
        """Compare the checksum of all of the section, read since `before`; `WeightsLost` if it is another.

        If the file has stood still since `before`, and a change since then would show, the section is proven.
        """
        if checksum != self._checksums[section.name]:
            raise self.lost(section, "its checksum does not match its content")
        if before.settled and self.state() == before:
            self._proven[section.name] = before

    def lost(self, section: Section, reason: str) -> WeightsLost:
        """The error that says so."""
        return WeightsLost(
            f"{section.name} of the weights in {self.path} is lost: {reason}. Delete the file and start the server "
            "again: the server then writes it again"
        )

    def _read_lead(self) -> bytes:
        """The bytes before the tensors."""
        start = os.pread(self._file.fileno(), 8, 0)
        length = int.from_bytes(start, "little")
        if not 0 < length <= min(_MAX_HEADER_BYTES, self.state().size - 8):
            raise BundleFileUnusable("it does not begin with the length of its header")
        return start + os.pread(self._file.fileno(), length, 8)


def _open_again(file: FileIO, path: Path) -> FileIO:
    """Another descriptor of the open `file`, for reads here and there."""
    other = path.open("rb", buffering=0)
    if not os.path.samestat(os.fstat(file.fileno()), os.fstat(other.fileno())):
        other.close()
        raise BundleFileUnusable("it has been replaced while it was opened")
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(other.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
    return other
