"""Clients of OpenAI's API before one server, or before a front door: their conversations, and what each turn said."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
from openai import OpenAI

from tests.cluster.pair import SOON_S

MODEL = "tiny-llama"
ASKED: Any = {"model": MODEL, "temperature": 0, "extra_body": {"ignore_eos": True}}
TOKENS = 4
TEXTS = ("One", "Two", "Three", "Four", "Five")


class Said(NamedTuple):
    """One answer."""

    text: str
    prompt: int
    cached: int


@contextmanager
def sdk(url: str, *, api_key: str = "none") -> Iterator[OpenAI]:
    """The official client, which repeats nothing."""
    with OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=SOON_S) as client:
        yield client


@dataclass
class Chat:
    """A chat whose calls are bound by a name. Each call sends all of it."""

    name: str
    messages: list[Any] = field(default_factory=list)
    session: str = ""

    def say(self, client: OpenAI, text: str) -> Said:
        """One more turn."""
        messages = [*self.messages, {"role": "user", "content": text}]
        raw = client.chat.completions.with_raw_response.create(
            **ASKED, messages=messages, max_tokens=TOKENS, extra_headers={"X-Session-ID": self.name}
        )
        answer = raw.parse()
        reply, usage = answer.choices[0].message.content or "", answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        self.session = raw.headers["X-Session-ID"]
        self.messages = [*messages, {"role": "assistant", "content": reply}]
        return Said(reply, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0)


@dataclass
class Chain:
    """Responses, each of which goes on from the one before."""

    name: str | None = None
    ids: list[str] = field(default_factory=list)
    session: str = ""

    def say(self, client: OpenAI, text: str) -> Said:
        """One more response."""
        previous = self.ids[-1] if self.ids else None
        headers = {} if self.name is None else {"X-Session-ID": self.name}
        raw = client.responses.with_raw_response.create(
            **ASKED, input=text, previous_response_id=previous, max_output_tokens=TOKENS, extra_headers=headers
        )
        answer = raw.parse()
        assert answer.usage is not None
        self.ids.append(answer.id)
        self.session = raw.headers["X-Session-ID"]
        return Said(answer.output_text, answer.usage.input_tokens, answer.usage.input_tokens_details.cached_tokens)


def named(http: httpx.Client, name: str) -> list[str]:
    """Ids of the caller's sessions that are there under the name."""
    found = http.get("/v1/sessions", params={"name": name}).raise_for_status().json()["data"]
    return [each["id"] for each in found]


def status(http: httpx.Client, response_id: str) -> int:
    """What a server says of a response."""
    return http.get(f"/v1/responses/{response_id}").status_code
