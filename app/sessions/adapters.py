"""The models that clients may name: the base under each of its names, and LoRA adapters, which come and go."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from app.domain.errors import AdapterMissing, DjinnError, EngineAway, FieldOutOfRange, UnknownModel, WrongState
from app.domain.text import MODEL_NAME, is_model_name
from app.domain.values import Adapter, LoadedAdapter
from app.engine_process.executor import EngineExecutor
from app.messages import LoadAdapter, UnloadAdapter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter that is loaded from `path`."""

    adapter: Adapter
    path: str
    loaded: LoadedAdapter
    since: int = field(default_factory=lambda: int(time.time()))
    """Unix seconds."""


class Adapters:
    """Which adapter each name stands for. Used on the event loop only."""

    def __init__(
        self, executor: EngineExecutor, names: Sequence[str], started: Sequence[tuple[str, str]], folder: Path | None
    ) -> None:
        """The base is called `names`. `started` are names and paths of the adapters that the engine has loaded with
        it. Others are loaded only from below `folder`.

        Raises `FieldOutOfRange` for a name that stands for two models.
        """
        self._executor, self.names, self._folder = executor, tuple(names), folder
        self._served: dict[str, ServedAdapter] = {}
        self._changing = asyncio.Lock()
        for (name, path), loaded in zip(started, executor.engine.info.adapters, strict=True):
            self._require_free(name, "lora")
            self._served[name] = ServedAdapter(Adapter(name, loaded.digest), path, loaded)

    def __iter__(self) -> Iterator[ServedAdapter]:
        return iter(self._served.values())

    @property
    def all_names(self) -> list[str]:
        """Those of the base, then those of adapters."""
        return [*self.names, *self._served]

    def get(self, name: str | None) -> ServedAdapter | None:
        """The adapter of that name; None: it is the base's, or nothing is said. Raises `UnknownModel`."""
        if name is None or name in self.names:
            return None
        if name not in self._served:
            raise UnknownModel(
                f"there is no model {name[:300]!r} here, only {', '.join(map(repr, self.all_names))}", param="model"
            )
        return self._served[name]

    def find(self, name: str | None) -> Adapter | None:
        """What a session of that model is computed with. Raises as `get`."""
        found = self.get(name)
        return None if found is None else found.adapter

    def by_digest(self, digest: str) -> Adapter | None:
        """The first that has these files."""
        return next((each.adapter for each in self if each.adapter.digest == digest), None)

    def require(self, adapter: Adapter | None) -> None:
        """Raise `AdapterMissing` unless what a session is computed with is loaded, whatever its name is by now."""
        if adapter is None or self.by_digest(adapter.digest) is not None:
            return
        same = self._served.get(adapter.name)
        other = "" if same is None else f"; the one of that name now has other files ({same.adapter.digest[:12]})"
        raise AdapterMissing(
            f"the session is computed with the LoRA adapter {adapter.name!r} ({adapter.digest[:12]}), which is not "
            f"loaded{other}",
            param="model",
        )

    async def load(self, name: str, path: str) -> ServedAdapter:
        """Load the adapter in the folder `path`, which is relative to that of adapters or lies in it.

        Raises `FieldOutOfRange` for a path that leads out of that folder, or if there is none, `WrongState` for a name
        that is taken, and what the engine raises.
        """
        if not is_model_name(name):
            raise FieldOutOfRange(f"name must be {MODEL_NAME}", param="name")
        async with self._changing:
            self._require_free(name, "name")
            where = str(await asyncio.to_thread(self._inside, path))
            try:
                loaded: LoadedAdapter = await self._executor.call(partial(LoadAdapter, path=where))
            except FieldOutOfRange as error:
                error.param = "path"
                raise
            served = self._served[name] = ServedAdapter(Adapter(name, loaded.digest), where, loaded)
        logger.info("adapter %s is loaded from %s (%s)", name, where, loaded.digest[:12])
        return served

    async def unload(self, name: str) -> None:
        """Forget the adapter. Its sessions stay, and go on once the same files are loaded again.

        Raises `UnknownModel`, `FieldOutOfRange` for the base, and `WrongState` while turns of its sessions wait, run or
        are paused.
        """
        async with self._changing:
            served = self.get(name)
            if served is None:
                raise FieldOutOfRange(f"name: {name!r} is the base model, which stays", param="name")
            digest = served.adapter.digest
            if sum(each.adapter.digest == digest for each in self) == 1:
                try:
                    await self._executor.call(partial(UnloadAdapter, digest=digest))
                except WrongState as error:
                    raise WrongState(f"model {name!r} cannot be unloaded: {error.message}", param="name") from error
            del self._served[name]
        logger.info("adapter %s is unloaded", name)

    async def reload(self) -> None:
        """Load all again, in an engine that has none. One that has changed, or is gone, is unloaded."""
        async with self._changing:
            for name, served in tuple(self._served.items()):
                make = partial(LoadAdapter, path=served.path)
                try:
                    found: LoadedAdapter = await self._executor.call(make, while_restarting=True)
                    if found.digest == served.adapter.digest:
                        continue
                    reason = "its files are others now"
                except EngineAway:
                    raise
                except DjinnError as error:
                    reason = error.message
                logger.error("adapter %s is not loaded any more: %s", name, reason)
                del self._served[name]

    def _require_free(self, name: str, param: str) -> None:
        if name in self.names:
            raise FieldOutOfRange(f"{param}: {name!r} is a name of the base model", param=param)
        if name in self._served:
            raise WrongState(f"{param}: there is a model {name!r} already: unload it first", param=param)

    def _inside(self, path: str) -> Path:
        """The folder that is meant. Nothing outside the folder of adapters is looked at, not even by a link."""
        if self._folder is None:
            raise FieldOutOfRange("path: adapters are loaded only by a server with --lora-dir", param="path")
        try:
            base = self._folder.resolve()
            found = (base / path).resolve()
            is_inside = found.is_relative_to(base)
            if not is_inside or not all(each.resolve().is_relative_to(base) for each in found.glob("adapter_*")):
                raise FieldOutOfRange("path: it must lead to a folder in that of --lora-dir", param="path")
        except (OSError, ValueError, RuntimeError) as error:  # too long, with zeros, or links in a circle
            raise FieldOutOfRange("path: it leads to no folder", param="path") from error
        return found
