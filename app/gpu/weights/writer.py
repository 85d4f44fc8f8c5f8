"""Writing the file of bundles, with progress. The file is there whole or not at all."""

import io
import logging
import os
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from app.gpu.device.memory import PROGRESS_SECONDS
from app.gpu.weights.alignment import aligned
from app.gpu.weights.header import BundleContents, Section, encode_header, file_bytes, sections_of
from app.gpu.weights.layout import BundleLayout, Piece, host_bytes
from app.machine.files import sync
from app.machine.units import size
from app.model_store.install import disk_full_named, require_free_space

logger = logging.getLogger(__name__)


class Progress:
    """Logs, every few seconds, how many of `total` bytes are done; of short work, nothing."""

    def __init__(self, done: str, total: int) -> None:
        """`done` is what has been done with them: "written"."""
        self._what = done
        self._total = total
        self._done = 0
        self._told = time.perf_counter()

    def add(self, nbytes: int) -> None:
        """So many bytes more are done."""
        self._done += nbytes
        if time.perf_counter() - self._told > PROGRESS_SECONDS:
            self._told = time.perf_counter()
            logger.info("%s %s of %s of weights", self._what, size(self._done), size(self._total))


class FileWriter:
    """See `Writer`. Puts each bundle and table where the header says it is, and counts its checksum on the way.

    The checksum is zlib's CRC-32: sure to find one flipped bit and any burst of 32, it reads 4 GB/s on one core without
    special instructions, where SHA-256 with them reads 1.8 and BLAKE2b 0.9, and every start of a server reads it all.
    """

    def __init__(self, file: io.FileIO, contents: BundleContents) -> None:
        self._file = file
        self._contents = contents
        self._sections = {section.name: section for section in sections_of(contents)}
        self._checksums: dict[str, int] = {}
        self._progress = Progress("written", file_bytes(contents))
        file.truncate(file_bytes(contents))  # zeros wherever nothing is written

    def bundle(self, index: int, tensors: Sequence[Tensor]) -> None:
        if BundleLayout.of(tensors) != self._contents.layouts[index]:
            raise ValueError(f"bundle {index} is not laid out as was said")
        self._write(self._sections[f"bundle.{index}"], _dense(tensors))

    def table(self, index: int, matrix: Tensor) -> None:
        if Piece(tuple(matrix.shape), matrix.dtype, 0) != self._contents.tables[index]:
            raise ValueError(f"table {index} is not of the shape and dtype that was said")
        self._write(self._sections[f"table.{index}"], [host_bytes(matrix.cpu())])

    def finish(self) -> None:
        """Write the header, and have everything on the disk."""
        missing = self._sections.keys() - self._checksums.keys()
        if missing:
            raise ValueError(f"never written: {', '.join(sorted(missing))}")
        header = encode_header(self._contents, [self._checksums[name] for name in self._sections])
        _write_at(self._file, memoryview(header), 0)
        os.fsync(self._file.fileno())

    def _write(self, section: Section, content: Iterable[memoryview]) -> None:
        checksum, offset = 0, section.offset
        for part in content:
            checksum = zlib.crc32(part, checksum)
            _write_at(self._file, part, offset)
            offset += len(part)
            self._progress.add(len(part))
        self._checksums[section.name] = checksum


@contextmanager
def writing(path: Path, contents: BundleContents) -> Iterator[FileWriter]:
    """Write the file beside `path`, and rename it to `path` when the context ends well; else nothing is left of it.

    What a killed process left is cleared. Raises StoreFull, with both sizes before anything is written if the disk is
    too small then, and ValueError if something was not written.
    """
    scratch = path.with_name(f".{path.name}.partial")
    scratch.unlink(missing_ok=True)
    require_free_space(path.parent, file_bytes(contents))
    try:
        with disk_full_named(path.parent), scratch.open("wb", buffering=0) as file:
            writer = FileWriter(file, contents)
            yield writer
            writer.finish()
        scratch.rename(path)
        sync(path.parent)
    finally:
        scratch.unlink(missing_ok=True)


def _write_at(file: io.FileIO, content: memoryview, offset: int) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(file.fileno(), content[done:], offset + done)


def _dense(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """The bytes of a bundle: each tensor, and zeros up to the next."""
    for tensor in tensors:
        content = host_bytes(tensor.cpu())
        yield content
        yield memoryview(bytes(aligned(len(content)) - len(content)))
