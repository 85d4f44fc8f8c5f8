"""`python -m loadgen.rivals.baseline`: Transformers' `generate` behind OpenAI's completions, and nothing that makes it
clever. `transformers serve` takes no token ids, and has no `/tokenize`.

Static batching: requests that wait when a batch is done form the next one. Greedy answers only.
"""

import argparse
import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers import AutoModelForCausalLM
from transformers.utils import logging

MAX_BATCH = 32
"""As many streams as benchmarks have at once."""
PAD_ID = 0
GRACE_S = 1
"""For those who still read an answer when the server is told to stop."""


class CompletionRequest(BaseModel):
    """The part of OpenAI's completions that a load generator needs. Nothing is accepted and ignored."""

    model_config = ConfigDict(extra="forbid")

    model: str
    prompt: str | list[int] = Field(min_length=1)
    max_tokens: int = Field(16, ge=1)
    temperature: Literal[0] = 0
    ignore_eos: bool = False
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] = Field(default_factory=dict)
    return_token_ids: bool = False


class TokenizeRequest(BaseModel):
    """vLLM's."""

    prompt: str
    add_special_tokens: bool = True
    model: str | None = None


@dataclass(slots=True, eq=False)
class Job:
    """Tokens in, how many to generate after them, and where those go: None is the end, an exception why there are no
    more. `ignore_eos`: regardless of the end-of-text token.
    """

    prompt: list[int]
    max_tokens: int
    ignore_eos: bool
    abandoned: bool = False
    tokens: asyncio.Queue[int | Exception | None] = field(default_factory=asyncio.Queue)


class Model:
    """A model in evaluation mode on `threads` cores: one queue, and one batch at a time in a thread."""

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        torch.set_num_threads(threads)
        logging.disable_progress_bar()
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        eos = self._model.generation_config.eos_token_id
        self._eos = frozenset([eos] if isinstance(eos, int) else eos or [])
        self._model.generation_config.eos_token_id = None  # jobs end one by one: see `_Hand`
        self.context: int = self._model.config.max_position_embeddings
        self._queue: asyncio.Queue[Job] = asyncio.Queue()

    async def stream(self, job: Job) -> AsyncGenerator[int]:
        """The generated tokens as they come. A job whose reader left before its turn is skipped. Raises what
        `generate` does.
        """
        self._queue.put_nowait(job)
        try:
            while (token := await job.tokens.get()) is not None:
                if isinstance(token, Exception):
                    raise token
                yield token
        finally:
            job.abandoned = True

    async def work(self) -> None:
        """Run batches until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            waiting = [await self._queue.get()]
            while len(waiting) < MAX_BATCH and not self._queue.empty():
                waiting.append(self._queue.get_nowait())
            batch, end = [job for job in waiting if not job.abandoned], None
            try:
                if batch:
                    await asyncio.to_thread(self._generate, batch, loop)
            except Exception as error:  # whatever it is, those who wait must hear of it, and the next may do better
                end = error
            for job in batch:
                job.tokens.put_nowait(end)

    def _generate(self, jobs: list[Job], loop: asyncio.AbstractEventLoop) -> None:
        """Greedy tokens for all jobs in one left-padded batch, which ends with the last of them."""
        width = max(len(job.prompt) for job in jobs)
        padding = [width - len(job.prompt) for job in jobs]
        with torch.inference_mode():
            self._model.generate(
                input_ids=torch.tensor([[PAD_ID] * n + job.prompt for n, job in zip(padding, jobs, strict=True)]),
                attention_mask=torch.tensor([[0] * n + [1] * (width - n) for n in padding]),
                max_new_tokens=max(job.max_tokens for job in jobs),
                do_sample=False,
                pad_token_id=PAD_ID,
                streamer=_Hand(jobs, self._eos, loop),
            )


class _Hand:
    """A streamer for `generate`: hands out the tokens of each step until each job has all of its own."""

    def __init__(self, jobs: list[Job], eos: frozenset[int], loop: asyncio.AbstractEventLoop) -> None:
        self._jobs, self._eos, self._loop = jobs, eos, loop
        self._left: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Told the prompt first, then one token for every job of the batch, `[jobs]` int64."""
        if not self._left:
            self._left = [job.max_tokens for job in self._jobs]
            return
        for index, (token, job) in enumerate(zip(value.tolist(), self._jobs, strict=True)):
            if self._left[index] > 0:
                self._loop.call_soon_threadsafe(job.tokens.put_nowait, token)
                self._left[index] = 0 if token in self._eos and not job.ignore_eos else self._left[index] - 1

    def end(self) -> None:
        """Nothing is held back."""


def create_app(model: Model, tokenizer: Tokenizer, name: str) -> FastAPI:
    """`/v1/models`, `/v1/completions` and `/tokenize`, as OpenAI and vLLM have them."""

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.create_task(model.work())
        yield
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)

    app = FastAPI(lifespan=lifespan)

    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "max_model_len": model.context}]}

    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> Response:
        ids = tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens).ids
        return JSONResponse({"tokens": ids})

    @app.post("/v1/completions")
    async def complete(request: CompletionRequest) -> Response:
        if request.model != name:
            return JSONResponse(_error(404, f"there is no model {request.model}, only {name}"), 404)
        prompt = tokenizer.encode(request.prompt).ids if isinstance(request.prompt, str) else request.prompt
        if len(prompt) + request.max_tokens > model.context:
            told = f"{len(prompt)} and {request.max_tokens} tokens do not fit in {model.context}"
            return JSONResponse(_error(400, told), 400)
        if outside := [token for token in prompt if not 0 <= token < tokenizer.get_vocab_size()]:
            return JSONResponse(_error(400, f"{outside[0]} is not a token of the model"), 400)
        answer = _Answer(request, len(prompt), tokenizer)
        tokens = model.stream(Job(prompt, request.max_tokens, request.ignore_eos))
        if request.stream:
            return StreamingResponse(answer.events(tokens), media_type="text/event-stream")
        try:
            answer.tokens = [token async for token in tokens]
        except Exception as error:  # as above
            return JSONResponse(_error(500, str(error)), 500)
        text = tokenizer.decode(answer.tokens, skip_special_tokens=False)
        return JSONResponse({**answer.body(text, answer.tokens, is_over=True), "usage": answer.usage()})

    return app


class _Answer:
    """One completion on its way out."""

    def __init__(self, request: CompletionRequest, prompt_tokens: int, tokenizer: Tokenizer) -> None:
        self._request, self._prompt_tokens, self._tokenizer = request, prompt_tokens, tokenizer
        self._head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        self.tokens: list[int] = []

    async def events(self, tokens: AsyncGenerator[int]) -> AsyncGenerator[str]:
        """Server-sent events, one for each token; what goes wrong once they have begun is one too."""
        decoder = DecodeStream(skip_special_tokens=False)
        try:
            async for token in tokens:
                self.tokens.append(token)
                yield _event(self.body(decoder.step(self._tokenizer, token) or "", [token]))
        except Exception as error:  # as above
            yield _event(_error(500, str(error)))
            return
        finally:
            await tokens.aclose()
        yield _event(self.body("", [], is_over=True))
        if self._request.stream_options.get("include_usage"):
            yield _event({**self.body("", []), "choices": [], "usage": self.usage()})
        yield "data: [DONE]\n\n"

    def body(self, text: str, tokens: list[int], *, is_over: bool = False) -> dict[str, Any]:
        """One chunk, or the whole."""
        reason = ("length" if len(self.tokens) == self._request.max_tokens else "stop") if is_over else None
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        if self._request.return_token_ids:
            choice["token_ids"] = tokens
        return {**self._head, "model": self._request.model, "choices": [choice]}

    def usage(self) -> dict[str, Any]:
        """Nothing is ever cached: each turn computes its whole history."""
        counts = {"prompt_tokens": self._prompt_tokens, "completion_tokens": len(self.tokens)}
        return {**counts, "total_tokens": sum(counts.values()), "prompt_tokens_details": {"cached_tokens": 0}}


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def _error(status: int, message: str) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "code": str(status), "param": None}}


async def _serve(options: argparse.Namespace) -> None:
    tokenizer = Tokenizer.from_file(str(Path(options.model) / "tokenizer.json"))
    app = create_app(Model(options.model, options.dtype, options.threads), tokenizer, options.served_name)
    config = uvicorn.Config(
        app, host="127.0.0.1", port=options.port, log_level="warning", timeout_graceful_shutdown=GRACE_S
    )
    await uvicorn.Server(config).serve()


def main() -> None:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m loadgen.rivals.baseline", description=__doc__)
    parser.add_argument("--model", required=True, help="a Transformers folder")
    parser.add_argument("--served-name", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True, help="cores for all there is")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
