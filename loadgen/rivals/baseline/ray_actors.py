"""The model in Ray actors, each of which owns one logical GPU and its share of the cores: static partitioning."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import ray

from loadgen.rivals.baseline.affinity import Affinity
from loadgen.rivals.baseline.model import CausalModel
from loadgen.rivals.baseline.requests import GenerationFailed, Job


class _Actor:
    """One replica of the model, which serves one job at a time."""

    def __init__(self, folder: str, dtype: str, threads: int) -> None:
        self._model = CausalModel(folder, dtype, threads)

    def context(self) -> int:
        return self._model.context

    def generate(self, job: Job) -> Iterator[int]:
        """The tokens as they come."""
        tokens: SimpleQueue[int | None] = SimpleQueue()
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(self._model.generate, [job], lambda _job, token: tokens.put(token))
            running.add_done_callback(lambda _running: tokens.put(None))
            while (token := tokens.get()) is not None:
                yield token
            running.result()


class RayGenerator:
    """`actors` actors; a conversation sticks to the one that had its first turn, and waits for it in its queue."""

    def __init__(self, folder: str, dtype: str, cores: int, actors: int) -> None:
        ray.init(num_cpus=cores, num_gpus=actors, include_dashboard=False, logging_level="warning")
        make: Any = ray.remote(num_gpus=1, num_cpus=cores / actors)(_Actor)
        threads = max(1, cores // actors)
        self._actors = [make.remote(folder, dtype, threads) for _ in range(actors)]
        self._turns = [asyncio.Lock() for _ in self._actors]
        self._affinity = Affinity(actors)
        self.context: int = ray.get(self._actors[0].context.remote())

    async def stream(self, job: Job) -> AsyncGenerator[int]:
        """See `Generator`. A turn that fails, or is not read to its end, leaves its conversation unknown."""
        worker = self._affinity.begin(job.prompt)
        answer: list[int] = []
        history = None
        try:
            async with self._turns[worker]:
                async for token in self._actors[worker].generate.options(num_returns="streaming").remote(job):
                    answer.append(await token)
                    yield answer[-1]
            history = (*job.prompt, *answer)
        except ray.exceptions.RayError as error:
            raise GenerationFailed(str(error)) from error
        finally:
            self._affinity.end(worker, history)

    async def close(self) -> None:
        ray.shutdown()
