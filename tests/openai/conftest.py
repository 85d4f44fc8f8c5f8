"""A server on a model that Transformers has saved, the official SDK, and Transformers itself to compare with."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.openai.reference import Reference, save_tiny_model
from tests.serving import serve

MODEL = "tiny"


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The shared server's model, as Transformers runs it."""
    folder: Path = tmp_path_factory.mktemp("models") / MODEL
    save_tiny_model(folder)
    return Reference(folder)


@pytest.fixture(scope="session")
def openai_url(reference: Reference) -> Iterator[str]:
    """Base URL of a server that these tests share, without API keys."""
    with serve(model=str(reference.folder)) as url:
        yield url


@pytest.fixture
def sdk(openai_url: str) -> Iterator[openai.OpenAI]:
    """The official client. Tests take it as `Any`: most of its answers' fields may be None by their types."""
    with openai.OpenAI(base_url=f"{openai_url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def http(openai_url: str) -> Iterator[httpx.Client]:
    """A plain client, for what the SDK hides."""
    with httpx.Client(base_url=openai_url, timeout=30) as client:
        yield client
