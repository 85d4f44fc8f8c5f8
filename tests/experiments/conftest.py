"""The server and the model of the tests of OpenAI's routes."""

from tests.openai.conftest import http, openai_url, reference

__all__ = ["http", "openai_url", "reference"]
