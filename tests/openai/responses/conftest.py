"""OpenAI's SDK as the tests of responses and conversations use it."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest


@pytest.fixture
def sdk(openai_url: str) -> Iterator[openai.OpenAI]:
    """It raises for an answer that its types do not allow."""
    strict: Any = {"_strict_response_validation": True}
    with openai.OpenAI(base_url=f"{openai_url}/v1", api_key="none", max_retries=0, timeout=30, **strict) as client:
        yield client
