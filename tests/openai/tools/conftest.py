"""Clients of a server with room for tools."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest


@pytest.fixture
def sdk(roomy_url: str) -> Iterator[openai.OpenAI]:
    """The official client."""
    with openai.OpenAI(base_url=f"{roomy_url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def http(roomy_url: str) -> Iterator[httpx.Client]:
    """A plain client, for what the SDK hides."""
    with httpx.Client(base_url=roomy_url, timeout=30) as client:
        yield client
