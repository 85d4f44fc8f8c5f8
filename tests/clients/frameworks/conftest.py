"""A server that every framework asks: of SmolLM2 if it is there, else of a tiny model with room for tools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from app.model_store.pull import model_folder
from app.settings import Settings
from tests.openai.reference import save_tiny_model
from tests.processes import serve_process

PULLED, TINY = "smollm2-135m-instruct", "tiny"


@dataclass(frozen=True)
class Served:
    """A server process and its model."""

    url: str
    model: str


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("server")
    if model_folder(PULLED, Settings().cache_dir).is_dir():
        name, path = PULLED, PULLED
    else:
        name, path = TINY, str(folder / TINY)
        save_tiny_model(folder / TINY, max_model_len=16384)
    with serve_process(folder / "state", "--model", path, "--kv-device", "512MiB") as server:
        yield Served(server.url, name)
