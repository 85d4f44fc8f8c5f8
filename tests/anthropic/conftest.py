"""A server, and the official SDK of Anthropic's API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tests.openai.reference import save_tiny_model
from tests.serving import serve

MODEL = "tiny"
ASK: Any = {"model": MODEL, "max_tokens": 12, "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for tools, each byte of which is a token."""
    folder: Path = tmp_path_factory.mktemp("models") / MODEL
    save_tiny_model(folder, max_model_len=8192)
    return folder


@pytest.fixture(scope="session")
def anthropic_url(folder: Path) -> Iterator[str]:
    """Base URL of a server that these tests share, without API keys."""
    with serve(model=str(folder), max_model_len=8192) as url:
        yield url


@pytest.fixture
def sdk(anthropic_url: str) -> Iterator[anthropic.Anthropic]:
    """The official client."""
    with anthropic.Anthropic(base_url=anthropic_url, api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def http(anthropic_url: str) -> Iterator[httpx.Client]:
    """A plain client, for what the SDK hides."""
    with httpx.Client(base_url=anthropic_url, timeout=30) as client:
        yield client


def text_of(message: anthropic.types.Message) -> str:
    """The text of an answer that is nothing but text."""
    assert all(block.type == "text" for block in message.content)
    return "".join(block.text for block in message.content if block.type == "text")


def prompt_of(usage: anthropic.types.Usage) -> int:
    """All tokens of the prompt."""
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
