"""The load on an OpenAI server: greedy streamed completions and the times at which their tokens arrive."""

import asyncio
import time

import httpx
import orjson

from benchmarks.peers.timeline import DecodePhase, Stream, measure_decode
from benchmarks.peers.workload import WARM_UP_TOKENS, Workload
from loadgen.processes.process import ServerFailedError

REQUEST_TIMEOUT_S = 600.0


class OpenAILoad:
    """Asks one model of one server. `http` carries the server's base URL.

    Every method raises httpx.HTTPError, or ServerFailedError when an answer is not the one that was asked for.
    """

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self._model = model

    async def warm_up(self, workload: Workload) -> None:
        """Once through every batch size, so that nothing is compiled or allocated under the clock."""
        for prompts in workload.decode:
            await self._run_phase(workload.warm_up[: len(prompts)], WARM_UP_TOKENS)
        await self._complete(workload.warm_up_long, 1)

    async def decode(self, workload: Workload) -> list[DecodePhase]:
        """One phase for each concurrency: all streams are submitted together."""
        return [measure_decode(await self._run_phase(prompts, workload.max_tokens)) for prompts in workload.decode]

    async def first_tokens_s(self, workload: Workload) -> list[float]:
        """Seconds to the first token of each long prompt, one after the other."""
        return [(await self._complete(prompt, 1)).first_token_s for prompt in workload.long]

    async def _run_phase(self, prompts: list[list[int]], max_tokens: int) -> list[Stream]:
        return await asyncio.gather(*(self._complete(prompt, max_tokens) for prompt in prompts))

    async def _complete(self, prompt: list[int], max_tokens: int) -> Stream:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        submitted = time.perf_counter()
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.is_error:
                raise ServerFailedError(f"HTTP {response.status_code}: {(await response.aread()).decode()}")
            arrivals, tokens = await _read_chunks(response)
        if tokens != max_tokens:
            raise ServerFailedError(f"asked for {max_tokens} tokens, the server reports {tokens}")
        return Stream(submitted, arrivals, tokens)


async def _read_chunks(response: httpx.Response) -> tuple[list[float], int]:
    """Arrival times of the chunks, and the completion tokens of the usage chunk, which brings no text: it has no
    choices, or an empty one (llama.cpp). Only that one is parsed: the client runs on the server's cores.
    """
    arrivals: list[float] = []
    tokens = 0
    async for line in response.aiter_lines():
        if not line.startswith("data: {"):
            continue
        if '"usage":{' in line:
            tokens = orjson.loads(line.removeprefix("data: "))["usage"]["completion_tokens"]
        elif line.startswith('data: {"error"'):
            raise ServerFailedError(line)
        else:
            arrivals.append(time.perf_counter())
    return arrivals, tokens
