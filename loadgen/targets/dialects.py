"""How servers differ that run completions without sessions: found out by asking, not by name."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from client.calls import Call
from client.errors import BadRequest, NotFound, Unprocessable
from client.transport import AsyncTransport
from loadgen.errors import LoadgenError
from loadgen.load.prompts import TokenIds
from loadgen.targets.base import TargetSpec, read_tokens, tokenize_call
from loadgen.targets.completion import CompletionDecoder, Decoder
from loadgen.targets.llamacpp_completion import LlamaCppDecoder

PROBE = "Hello"
TELL_TOKEN_IDS = {"return_token_ids": True}
REFUSALS = (BadRequest, NotFound, Unprocessable)


class Dialect(Protocol):
    """What is sent to a server, and how its answer is read."""

    def tokenize(self, text: str, special: bool) -> Call[TokenIds]:
        """The ids of `text`, with special tokens in front if `special`."""
        ...

    def completion(self, prompt: TokenIds, completion_tokens: int) -> Call[bytes]:
        """A streamed, greedy completion of exactly `completion_tokens`."""
        ...

    def decoder(self) -> Decoder:
        """For the events of one completion."""
        ...


@dataclass(frozen=True, slots=True)
class OpenAIDialect:
    """OpenAI's completions of `model` and vLLM's `/tokenize`; `extras` go with every completion."""

    model: str
    extras: Mapping[str, Any] = field(default_factory=dict)

    def tokenize(self, text: str, special: bool) -> Call[TokenIds]:
        return tokenize_call(text, special, self.model)

    def completion(self, prompt: TokenIds, completion_tokens: int) -> Call[bytes]:
        """See `Dialect`. `ignore_eos` is an extension that vLLM began."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": completion_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extras,
        }
        return Call("POST", "/v1/completions", bytes, json=body)

    def decoder(self) -> Decoder:
        return CompletionDecoder()


@dataclass(frozen=True, slots=True)
class LlamaCppDialect:
    """llama.cpp's own `/completion`: unlike its `/v1/completions` it tells token ids."""

    def tokenize(self, text: str, special: bool) -> Call[TokenIds]:
        return Call("POST", "/tokenize", read_tokens, json={"content": text, "add_special": special})

    def completion(self, prompt: TokenIds, completion_tokens: int) -> Call[bytes]:
        body = {
            "prompt": prompt,
            "n_predict": completion_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "cache_prompt": True,
            "return_tokens": True,
        }
        return Call("POST", "/completion", bytes, json=body)

    def decoder(self) -> Decoder:
        return LlamaCppDecoder()


async def find_dialect(spec: TargetSpec, model: str, transport: AsyncTransport) -> Dialect:
    """The dialect in which the server answers. Raises `LoadgenError` if there is none, `client.DjinnError`."""
    plain = OpenAIDialect(model)
    for dialect in (plain, LlamaCppDialect()):
        with suppress(*REFUSALS):
            if await transport.send(dialect.tokenize(PROBE, False)):
                return await _with_token_ids(plain, transport) if dialect is plain else dialect
    raise LoadgenError(f"target {spec.name} has no /tokenize as vLLM or llama.cpp have it")


async def _with_token_ids(plain: OpenAIDialect, transport: AsyncTransport) -> OpenAIDialect:
    """Ask for the ids of generated tokens, as vLLM tells them, unless the server refuses to."""
    probe = {"model": plain.model, "prompt": PROBE, "max_tokens": 1, **TELL_TOKEN_IDS}
    with suppress(*REFUSALS):
        await transport.send(Call("POST", "/v1/completions", bytes, json=probe))
        return OpenAIDialect(plain.model, TELL_TOKEN_IDS)
    return plain
