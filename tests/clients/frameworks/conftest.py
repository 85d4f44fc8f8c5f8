"""The servers that frameworks ask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from app.model_store.catalog import CATALOG
from app.model_store.pull import pulled_folder
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
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """SmolLM2 if it is there, else the tiny model."""
    if not pulled_folder(CATALOG[PULLED], Settings().cache_dir).is_dir():
        yield request.getfixturevalue("tiny")
        return
    with serve_process(
        tmp_path_factory.mktemp("server") / "state", "--model", PULLED, "--kv-device", "512MiB"
    ) as server:
        yield Served(server.url, PULLED)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The tiny model, each byte of which is a token, with room for tools. Its calls end as agents expect."""
    folder = tmp_path_factory.mktemp("server")
    save_tiny_model(folder / TINY, max_model_len=16384, may_end=True)
    flags = ("--model", str(folder / TINY), "--kv-device", "64MiB")
    with serve_process(folder / "state", *flags) as server:
        yield Served(server.url, TINY)
