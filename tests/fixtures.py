"""Fixtures for every test that needs a server."""

import random
import secrets
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from app.domain.values import ModelInfo
from app.engine_process import engine
from app.gpu.forward.forward import Runner
from app.routers.dependencies import Services
from tests.conftest import ServeWith
from tests.openai.reference import save_tiny_model
from tests.serving import own_server, running_services, serve


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """Base URL of a server that all tests share, without API keys."""
    with serve() as url:
        yield url


@pytest.fixture(scope="session")
def roomy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for tools, each byte of which is a token."""
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(folder, max_model_len=8192)
    return folder


@pytest.fixture(scope="session")
def roomy_url(roomy_model: Path) -> Iterator[str]:
    """Base URL of a server of that model, without API keys, which tests of other people's APIs share."""
    with serve(model=str(roomy_model), max_model_len=8192) as url:
        yield url


@pytest.fixture
def http(server_url: str) -> Iterator[httpx.Client]:
    """A plain HTTP client of the shared server."""
    with httpx.Client(base_url=server_url, timeout=30) as client:
        yield client


@pytest.fixture
def serve_with() -> Iterator[ServeWith]:
    """Starts a server with settings of one's own and returns a client of it; both end with the test."""
    with ExitStack() as ends:
        yield lambda **changed: ends.enter_context(own_server(**changed))


@pytest.fixture(autouse=True)
def hooks_of_pytest() -> Iterator[None]:
    """`djinn serve` in this process takes uncaught errors for its log: pytest must have those of the next test."""
    before = sys.excepthook, sys.unraisablehook, threading.excepthook, warnings.showwarning
    yield
    sys.excepthook, sys.unraisablehook, threading.excepthook, warnings.showwarning = before


@pytest.fixture(autouse=True)
def same_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns without a seed get the same ones in each run: in 1 of 200, the first token would end the text."""
    monkeypatch.setattr(secrets, "randbits", random.Random(0).getrandbits)


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn of hundreds of tokens takes seconds: it is under way until the test has looked at it, on any machine."""
    launch = Runner.launch
    monkeypatch.setattr(Runner, "launch", lambda *asked: (time.sleep(0.01), launch(*asked))[1])  # type: ignore[func-returns-value]


@pytest.fixture
def engine_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """`djinn serve` in this process runs its engine in a thread: one in a process takes seconds to start."""
    monkeypatch.setattr(engine, "EngineProcess", lambda timeout_s, stuck_s: None)


@pytest.fixture
async def info() -> ModelInfo:
    """The tiny model, as a server describes it."""
    async with running_services() as running:
        return running.info


@pytest.fixture
async def services() -> AsyncIterator[Services]:
    """The parts of a running server, without HTTP in front."""
    async with running_services() as running:
        yield running
