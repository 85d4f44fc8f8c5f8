"""What clients upload to look inside the model: kept by owner, kind and name, journaled, and loaded by the engine."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from app.domain.activations import Dictionary, StoredFile, Upload, Uploaded, UploadKey, UploadKind
from app.domain.breakpoints import TensorData, TopFeatures
from app.domain.errors import DiskShort, DjinnError, EngineAway, FieldOutOfRange, NotFound, UploadInUse, UploadsFull
from app.engine_process.executor import EngineExecutor
from app.journal.journal import Journal
from app.journal.tables import load_uploads
from app.machine.budget import DiskFull, DiskRoom, Share, byte_budget
from app.machine.files import make_writable, sync
from app.messages import DropUpload, LoadUpload
from app.sessions.keeper import JournalRoom

logger = logging.getLogger(__name__)

MAX_UPLOADS = 1000
"""Of one owner and kind."""
SUFFIX, PART = ".safetensors", ".part"

T = TypeVar("T", bound=Upload)
R = TypeVar("R")
Make = Callable[[StoredFile], Uploaded]
"""What an upload is, once its file is known."""


class Uploads:
    """Every owner's uploads. A vector is in the journal. Of all else the numbers are in a file, which the engine loads:
    files of the same bytes are one. Used on the event loop only.
    """

    def __init__(
        self,
        journal: Journal | None,
        executor: EngineExecutor,
        folder: Path,
        disk: DiskRoom,
        max_bytes: int,
        room: JournalRoom | None = None,
    ) -> None:
        """Takes up what the journal has, which must have been loaded. Files are in `folder` on `disk`; all of them have
        at most `max_bytes`. `room` is that on the journal's disk.

        Raises `FieldOutOfRange` if the folder cannot be written to.
        """
        self._journal, self._executor, self._disk, self._folder = journal, executor, disk, folder
        self._room = room or JournalRoom(None)
        try:
            make_writable(self._folder, 0o700)
        except OSError as error:
            raise FieldOutOfRange(f"cannot keep uploads in {folder}: {error.strerror}", param="state_dir") from error
        self._kept: dict[UploadKey, Upload] = {} if journal is None else journal.store.read(load_uploads)
        self._budget = byte_budget(max_bytes, "dictionaries, lenses and probes", UploadsFull)
        self._shares: dict[UploadKey, Share] = {}
        self._loaded: set[str] = set()
        """Digests of the files that the engine has."""
        self._held = Counter[str]()
        """How many jobs need a file, by its digest."""
        self._changing = asyncio.Lock()
        known = {each.file.digest for each in self._kept.values() if not isinstance(each, TensorData)}
        for path in self._folder.glob("*"):
            if path.suffix == PART or (path.suffix == SUFFIX and path.stem not in known):
                path.unlink()  # a crash came before the journal had it, or after it had let it go

    @property
    def most(self) -> int:
        """Bytes that all files may have."""
        return self._budget.limit

    def get(self, owner: str | None, kind: UploadKind, name: str, form: type[T], *, param: str | None = None) -> T:
        """The owner's upload of that name. Raises `NotFound`, about `param`, which is `kind` unless it is given."""
        found = self._kept.get(UploadKey(owner, kind, name))
        if not isinstance(found, form):
            raise NotFound(f"no {kind} {name[:100]!r}", param=param or kind)
        return found

    def require_loaded(self, found: Uploaded, kind: UploadKind) -> None:
        """Raise `UploadsFull` unless the engine has it: it would not fit when the server started."""
        if not self.is_loaded(found):
            raise UploadsFull(f"the {kind} is not loaded: delete others, and upload it again", param=kind)

    def features(self, owner: str | None, name: str, top_k: int) -> tuple[Dictionary, TopFeatures]:
        """The owner's dictionary of that name, and how its most active features are read. Raises `NotFound`,
        `UploadsFull`.
        """
        found = self.get(owner, UploadKind.DICTIONARY, name, Dictionary, param="features.dictionary")
        self.require_loaded(found, UploadKind.DICTIONARY)
        return found, TopFeatures(name, found.file.digest, found.width, found.k, min(top_k, found.features))

    def is_loaded(self, found: Uploaded) -> bool:
        """Whether the engine has its file."""
        return found.file.digest in self._loaded

    def owned_by(self, owner: str | None, kind: UploadKind) -> dict[str, Any]:
        """The owner's uploads of that kind by name, in the order of their names."""
        mine = {key.name: each for key, each in self._kept.items() if (key.owner, key.kind) == (owner, kind)}
        return dict(sorted(mine.items()))

    async def put_vector(self, owner: str | None, name: str, tensor: TensorData) -> None:
        """Keep `tensor`, in the place of the owner's vector of that name if there is one.

        Breakpoints keep the vector that they were armed with. Raises `FieldOutOfRange` if the owner has too many
        vectors, `DiskShort`, and `NotDurable` if the journal failed: the vector is there, but a restart would lose it.
        """
        key = UploadKey(owner, UploadKind.VECTOR, name)
        self._require_place(key)
        with self._room.claiming(len(tensor.data)):
            await self._write(key, tensor)

    @contextmanager
    def part(self) -> Iterator[Path]:
        """A file in the folder for what is still to be read, which is gone at the end of the block."""
        path = self._folder / f"{secrets.token_hex(16)}{PART}"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    async def put(self, key: UploadKey, make: Make, tensors: Mapping[str, NDArray[np.float32]]) -> Uploaded:
        """Keep `tensors` in a file, and what `make` says of it, in the place of the owner's upload of that name;
        returns that. The engine has loaded it by then.

        Raises `UploadsFull`, `FieldOutOfRange` if the owner has too many, `DiskShort`, `UploadInUse` if the one before
        has to stay, and `NotDurable` as vectors do.
        """
        async with self._changing:
            self._require_place(key)
            share = Share(self._budget, key.owner)
            share.grow(sum(tensor.nbytes for tensor in tensors.values()))
            before = self._kept.get(key)
            try:
                file = await asyncio.to_thread(self._store, tensors)
                made = make(file)
                if file.digest not in self._loaded:
                    await self._executor.call(partial(LoadUpload, path=str(self.path(file)), digest=file.digest))
                    self._loaded.add(file.digest)
                try:
                    await self._unload(key, before, but=made)
                except UploadInUse:
                    await self._unload(key, made, but=before)
                    self._remove_file(made)
                    raise
            except BaseException:
                share.shrink()
                raise
            old = self._shares.pop(key, None)
            self._shares[key] = share
            if old is not None:
                old.shrink()
            try:
                await self._write(key, made)
            finally:
                self._remove_file(before)
            return made

    async def delete(self, owner: str | None, kind: UploadKind, name: str) -> None:
        """Forget it. Raises `NotFound`, `UploadInUse`, `EngineAway`, and `NotDurable` as `put_vector`."""
        key = UploadKey(owner, kind, name)
        async with self._changing:
            before = self._kept.get(key)
            if before is None:
                raise NotFound(f"no {kind} {name[:100]!r}", param=kind)
            await self._unload(key, before)
            if (share := self._shares.pop(key, None)) is not None:
                share.shrink()
            try:
                await self._write(key, None)
            finally:
                self._remove_file(before)

    async def load_all(self) -> None:
        """Have an engine that has none load all files. One that does not fit, or is damaged, stays listed."""
        async with self._changing:
            self._loaded.clear()
            for key, each in self._kept.items():
                if isinstance(each, TensorData):
                    continue
                try:
                    if key not in self._shares:
                        share = Share(self._budget, key.owner)
                        share.grow(each.file.bytes)
                        self._shares[key] = share
                    if each.file.digest not in self._loaded:
                        load = partial(LoadUpload, path=str(self.path(each.file)), digest=each.file.digest)
                        await self._executor.call(load, while_restarting=True)
                        self._loaded.add(each.file.digest)
                except EngineAway:
                    raise
                except DjinnError as error:
                    logger.error("a %s is not loaded: %s", key.kind, error.message)

    def path(self, file: StoredFile) -> Path:
        """Where its bytes are."""
        return self._folder / f"{file.digest}{SUFFIX}"

    def rows(self, file: StoredFile, index: int, names: tuple[str, ...]) -> list[NDArray[np.float32]]:
        """Row `index` of tensors of the file, or element `index` of one without rows. Raises `NotFound`."""
        return self._read(file, lambda opened: [opened.get_slice(name)[index] for name in names])

    def numbers(self, file: StoredFile) -> NDArray[np.float32]:
        """The tensor `weights` of the file. Raises `NotFound`."""
        return self._read(file, lambda opened: opened.get_tensor("weights"))

    def _read(self, file: StoredFile, read: Callable[[Any], R]) -> R:
        try:
            with safe_open(self.path(file), framework="numpy") as opened:
                return read(opened)
        except (OSError, SafetensorError) as error:
            raise NotFound("the file of the upload is missing or damaged: upload it again") from error

    def _require_place(self, key: UploadKey) -> None:
        mine = self.owned_by(key.owner, key.kind)
        if key.name not in mine and len(mine) >= MAX_UPLOADS:
            of = {UploadKind.DICTIONARY: "dictionaries", UploadKind.LENS: "lenses"}.get(key.kind, f"{key.kind}s")
            raise FieldOutOfRange(f"there are {MAX_UPLOADS} {of}, the most allowed: delete some", param="name")

    def _store(self, tensors: Mapping[str, NDArray[np.float32]]) -> StoredFile:
        """Write the file, whole or not at all. Raises `DiskShort`."""
        with self.part() as part:
            try:
                with self._disk.claiming() as claim:
                    claim.grow(sum(tensor.nbytes for tensor in tensors.values()))
                    save_file(dict(tensors), part)
                os.chmod(part, 0o600)
                with part.open("rb") as opened:
                    digest = hashlib.file_digest(opened, "sha256").hexdigest()
                file = StoredFile(digest, part.stat().st_size)
                sync(part)
                part.replace(self.path(file))
                sync(self._folder)
            except (OSError, DiskFull, SafetensorError) as error:
                raise DiskShort(f"the upload was not stored: {getattr(error, 'strerror', error)}") from error
        return file

    async def _write(self, key: UploadKey, upload: Upload | None) -> None:
        if upload is None:
            del self._kept[key]
        else:
            self._kept[key] = upload
        if self._journal is not None:
            self._journal.append(key, upload)
            await self._journal.settled(key)

    @contextmanager
    def holding(self, found: Uploaded) -> Iterator[None]:
        """The upload stays for the block: deleting it, or putting another one in its place, raises `UploadInUse`."""
        self._held[found.file.digest] += 1
        try:
            yield
        finally:
            self._held[found.file.digest] -= 1

    async def _unload(self, key: UploadKey, gone: Upload | None, *, but: Upload | None = None) -> None:
        """Have the engine forget an upload that is about to go, unless another one has the same file, or what is to
        come does. Raises `UploadInUse` if something needs it.
        """
        if gone is None or isinstance(gone, TensorData):
            return
        digest = gone.file.digest
        others = [each for other, each in self._kept.items() if other != key] + ([] if but is None else [but])
        if any(not isinstance(each, TensorData) and each.file.digest == digest for each in others):
            return
        if self._held[digest]:
            raise UploadInUse("a job needs it: wait for its end, or cancel it", param="name")
        if digest in self._loaded:  # an engine that is away cannot say what needs it
            await self._executor.call(partial(DropUpload, digest=digest))
        self._loaded.discard(digest)

    def _remove_file(self, gone: Upload | None) -> None:
        """Delete the file of an upload that is no more, unless another one has the same."""
        if gone is None or isinstance(gone, TensorData):
            return
        kept = (each.file.digest for each in self._kept.values() if not isinstance(each, TensorData))
        if gone.file.digest not in kept:
            self.path(gone.file).unlink(missing_ok=True)
