"""LangChain's standard suite for chat models, with `ChatOpenAI`; pytest collects it in the frameworks' environment.

Each test with an `xfail` asks for a model's wit, which random weights lack. The suite itself skips:

- four tests of another model's name, since a server has one model,
- five tests of images, audio and PDFs, and one of Anthropic's forms of content,
- a test of time, which plays back recordings.
"""

import os
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

TO_THE_END = {ord('"'): 100, ord("}"): 99}
"""Token ids of bytes. Random weights end no text and no number of an answer by themselves."""


class TestDjinn(ChatModelIntegrationTests):
    """A model that reads and writes text."""

    @property
    def chat_model_class(self) -> Any:
        """What the suite tests."""
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """How it is made."""
        served = {"base_url": f"{os.environ['DJINN_URL']}/v1", "api_key": "none", "model": os.environ["DJINN_MODEL"]}
        return {**served, "temperature": 0, "max_tokens": 300, "logit_bias": TO_THE_END, "stream_usage": True}

    @property
    def has_tool_choice(self) -> bool:
        """Whether a call can be forced."""
        return True

    @property
    def supports_json_mode(self) -> bool:
        """Whether an answer can be any JSON object."""
        return True

    @pytest.mark.xfail(reason="The model is to call with the number in the question.")
    def test_tool_calling(self, model: Any) -> None:
        """See the suite."""
        super().test_tool_calling(model)

    @pytest.mark.xfail(reason="The model is to call with the number in the question.")
    async def test_tool_calling_async(self, model: Any) -> None:
        """See the suite."""
        await super().test_tool_calling_async(model)

    @pytest.mark.xfail(reason="The model is to call once, where it may call several times.")
    def test_tool_calling_with_no_arguments(self, model: Any) -> None:
        """See the suite."""
        super().test_tool_calling_with_no_arguments(model)

    @pytest.mark.xfail(reason="The model is to choose the keys that the question names.")
    def test_json_mode(self, model: Any) -> None:
        """See the suite."""
        super().test_json_mode(model)

    @pytest.mark.xfail(reason="The model is to decide for a tool by itself.")
    def test_agent_loop(self, model: Any) -> None:
        """See the suite."""
        super().test_agent_loop(model)

    @pytest.mark.xfail(reason="The model is to repeat Chinese characters.")
    def test_unicode_tool_call_integration(self, model: Any, **options: Any) -> None:
        """See the suite."""
        super().test_unicode_tool_call_integration(model, **options)
