"""Which data type is the fastest on this machine, as a test would have it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from loadgen.processes.calibration import calibrate

CORES = 2


@cache
def _measured() -> tuple[str, bytes]:
    """Name and content of the note that remembers what was measured, which takes seconds."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DJINN_CACHE_DIR", folder)
        calibrate(_save_shape(Path(folder)), CORES)
        [note] = Path(folder, "calibration").iterdir()
        return note.name, note.read_bytes()


def _save_shape(model: Path) -> Path:
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps({"hidden_size": 64, "intermediate_size": 128}))
    return model


def remember(cache: Path, model: Path, slow: str) -> None:
    """Write a note in the server's `cache` in which type `slow` takes twice as long, and a config in folder `model`."""
    name, content = _measured()
    slowly, fast = (0.002, 0.02, 0.2), (0.001, 0.01, 0.1)
    seconds = {dtype: slowly if dtype == slow else fast for dtype in ("float32", "bfloat16")}
    _save_shape(model)
    (cache / "calibration").mkdir(parents=True, exist_ok=True)
    (cache / "calibration" / name).write_text(json.dumps({**json.loads(content), "seconds": seconds}))
