"""Peers live in a cache of the test's own, on a machine with a GPU or without."""

from collections.abc import Callable
from pathlib import Path

import pytest

from loadgen.peers.base import ServerSettings
from loadgen.peers.llamacpp import VERSION, LlamaCppSource

CONVERTER = """
import sys
open(sys.argv[sys.argv.index("--outfile") + 1], "w").write(" ".join(sys.argv[1:4]))
"""
BeOn = Callable[[bool], None]


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
