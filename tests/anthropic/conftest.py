"""The official SDK of Anthropic's API, and what its answers hold."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

MODEL = "tiny"
ASK: Any = {"model": MODEL, "max_tokens": 12, "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture
def sdk(roomy_url: str) -> Iterator[anthropic.Anthropic]:
    strict: Any = {"_strict_response_validation": True}  # an answer that its types do not allow is an error
    with anthropic.Anthropic(base_url=roomy_url, api_key="none", max_retries=0, timeout=30, **strict) as client:
        yield client


@pytest.fixture(scope="session")
def server_url(roomy_url: str) -> str:
    """The server whose model has room for tools: a plain client asks it too."""
    return roomy_url


def text_of(message: anthropic.types.Message) -> str:
    """The text of an answer that is nothing but text."""
    assert all(block.type == "text" for block in message.content)
    return "".join(block.text for block in message.content if block.type == "text")


def prompt_of(usage: anthropic.types.Usage) -> int:
    """All tokens of the prompt."""
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
