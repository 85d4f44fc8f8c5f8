"""Peers live in a cache of the test's own, on a machine with a GPU or without."""

import json
from collections.abc import Callable
from functools import cache as remembered
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from loadgen.peers.base import ServerSettings
from loadgen.peers.llamacpp_source import VERSION, LlamaCppSource
from loadgen.processes.calibration import calibrate

CONVERTER = """
import sys
open(sys.argv[sys.argv.index("--outfile") + 1], "w").write(" ".join(sys.argv[1:4]))
"""
BeOn = Callable[[bool], None]
CORES = 2


@remembered
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


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DJINN_CACHE_DIR", raising=False)
    return tmp_path / ".cache/djinn/peers"


@pytest.fixture
def settings(tmp_path: Path) -> ServerSettings:
    return ServerSettings(tmp_path / "models/tiny", "bfloat16", kv_tokens=20480, context_tokens=1728, cores=(0, 1))


@pytest.fixture
def model(settings: ServerSettings) -> Path:
    """A folder with weights, or at least with a file of that name."""
    folder = settings.model
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    return folder


@pytest.fixture
def source(cache: Path) -> LlamaCppSource:
    """llama.cpp's source, unpacked, with another converter than its own."""
    source = LlamaCppSource(cache / "llamacpp" / VERSION)
    source.root.mkdir(parents=True)
    source.converter.write_text(CONVERTER)
    return source


@pytest.fixture
def on_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BeOn:
    """Be on a machine with one, or without: NVIDIA's program is there, or nothing is."""
    programs = tmp_path / "programs"
    programs.mkdir()

    def be(there: bool) -> None:
        if there:
            (programs / "nvidia-smi").touch(0o755)
        monkeypatch.setenv("PATH", str(programs))

    return be
