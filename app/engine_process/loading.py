"""What each of the two processes makes of the settings for itself."""

import tempfile
from dataclasses import replace
from pathlib import Path

from app.domain.values import WeightsDtype
from app.engine_process.frames import Load
from app.logs import Log
from app.machine.files import DiskRoom
from app.model_store.resolve import ResolvedModel, resolve
from app.settings import Settings


def load_frame(settings: Settings, log_level: int) -> Load:
    """The part of the settings that an engine process needs. It has no keys."""
    folder = settings.state_dir
    return Load(
        model=settings.model,
        served_name=settings.served_name,
        cache_dir=str(settings.cache_dir.expanduser()),
        seed=settings.seed,
        weights_dtype=WeightsDtype(settings.weights_dtype),
        disk=tempfile.gettempdir() if folder is None else str(folder.expanduser()),
        reserve=0 if folder is None else int(settings.disk_reserve),
        log=Log(log_level, settings.log_format, settings.replica),
        engine=settings.engine(),
    )


def find_model(load: Load) -> ResolvedModel:
    """The model under the name that it is served by; the first time it may be fetched. Raises `DjinnError`."""
    model = resolve(load.model, cache_dir=Path(load.cache_dir), seed=load.seed, weights_dtype=load.weights_dtype)
    return replace(model, name=load.served_name or model.name)


def disk_room(load: Load) -> DiskRoom:
    """That beside the journal, or where the system keeps temporary files."""
    return DiskRoom(Path(load.disk), load.reserve)
