"""The routes: `/v1/models`, `/v1/completions` and `/tokenize`, as OpenAI and vLLM have them."""

import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from loadgen.rivals.baseline.local import LocalGenerator
from loadgen.rivals.baseline.requests import CompletionRequest, GenerationFailed, Job, TokenizeRequest


def create_front(generator: LocalGenerator, tokenizer: Tokenizer, model: str, context: int) -> FastAPI:
    """The server of `model`, whose conversations have at most `context` tokens."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await generator.close()

    app = FastAPI(lifespan=lifespan)

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": model, "object": "model", "max_model_len": context}]}

    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> Response:
        if request.model not in (None, model):
            return _error(404, f"there is no model {request.model}, only {model}")
        ids = tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens).ids
        return JSONResponse({"tokens": ids})

    @app.post("/v1/completions")
    async def complete(request: CompletionRequest) -> Response:
        if request.model != model:
            return _error(404, f"there is no model {request.model}, only {model}")
        prompt = tokenizer.encode(request.prompt).ids if isinstance(request.prompt, str) else request.prompt
        if len(prompt) + request.max_tokens > context:
            return _error(400, f"{len(prompt)} and {request.max_tokens} tokens do not fit in {context}")
        if outside := [token for token in prompt if not 0 <= token < tokenizer.get_vocab_size()]:
            return _error(400, f"{outside[0]} is not a token of the model")
        job = Job(tuple(prompt), request.max_tokens, request.ignore_eos)
        answer = Answer(request, len(prompt), tokenizer)
        if request.stream:
            return StreamingResponse(answer.events(generator.stream(job)), media_type="text/event-stream")
        try:
            return JSONResponse(await answer.whole(generator.stream(job)))
        except GenerationFailed as error:
            return _error(500, str(error))

    return app


class Answer:
    """One completion on its way out."""

    def __init__(self, request: CompletionRequest, prompt_tokens: int, tokenizer: Tokenizer) -> None:
        self._request = request
        self._prompt_tokens = prompt_tokens
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=False)
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        self._tokens: list[int] = []

    async def events(self, tokens: AsyncGenerator[int]) -> AsyncGenerator[str]:
        """Server-sent events, one for each token; what goes wrong once they have begun is one too."""
        try:
            async with aclosing(tokens):
                async for token in tokens:
                    self._tokens.append(token)
                    text = self._decoder.step(self._tokenizer, token) or ""
                    yield _event(self._body(text, [token], None))
        except GenerationFailed as error:
            yield _event(_error_body(500, str(error)))
            return
        yield _event(self._body("", [], self._finish_reason()))
        if self._request.stream_options is not None and self._request.stream_options.include_usage:
            yield _event({**self._body("", [], None), "choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    async def whole(self, tokens: AsyncGenerator[int]) -> dict[str, Any]:
        """The answer in one piece. Raises `GenerationFailed`."""
        self._tokens = [token async for token in tokens]
        text = self._tokenizer.decode(self._tokens, skip_special_tokens=False)
        return {**self._body(text, self._tokens, self._finish_reason()), "usage": self._usage()}

    def _body(self, text: str, tokens: Sequence[int], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        if self._request.return_token_ids:
            choice["token_ids"] = list(tokens)
        return {**self._head, "model": self._request.model, "choices": [choice]}

    def _finish_reason(self) -> str:
        return "length" if len(self._tokens) == self._request.max_tokens else "stop"

    def _usage(self) -> dict[str, Any]:
        """Nothing is ever cached: each turn computes its whole history."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": len(self._tokens),
            "total_tokens": self._prompt_tokens + len(self._tokens),
            "prompt_tokens_details": {"cached_tokens": 0},
        }


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse(_error_body(status, message), status)


def _error_body(status: int, message: str) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "code": str(status), "param": None}}
