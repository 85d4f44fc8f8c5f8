"""A Djinn server under an experiment: its sessions, its memory, its metrics."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from client import AsyncSession, AsyncSessions, MemoryMap, calls
from client.calls import Call, TurnOptions
from client.models import Model
from loadgen.errors import LoadgenError
from loadgen.load.prompts import TokenIds
from loadgen.targets.base import MODELS, TargetSpec, check_context, tokenize_call
from loadgen.targets.histogram import Bucket, read_buckets

HISTOGRAMS = ("djinn_checkpoint_save_seconds", "djinn_checkpoint_restore_seconds", "djinn_resume_dispatch_seconds")
METRICS = Call("GET", "/metrics", bytes.decode)


def greedy(prompt: TokenIds, tokens: int | None = None) -> TurnOptions:
    """A turn of exactly `tokens` tokens, or of as many as the context has room for."""
    options: TurnOptions = {"token_ids": prompt, "temperature": 0.0, "ignore_eos": True}
    return options if tokens is None else {**options, "max_tokens": tokens}


class Subject:
    """A Djinn server. Raises `LoadgenError` for a target that is to be spoken to as another."""

    def __init__(self, spec: TargetSpec) -> None:
        if spec.model is not None:
            raise LoadgenError(f"target {spec.name}: this experiment is for Djinn servers: leave #{spec.model} out")
        self.spec = spec
        self.max_model_len = self.num_layers = 0
        self._transport = spec.transport()
        self._sessions = AsyncSessions(self._transport)

    async def prepare(self, tokens: int) -> None:
        """Ask what the server runs. Raises `LoadgenError` unless its context holds `tokens` tokens."""
        models = await self._transport.send(MODELS)
        check_context(self.spec, models, tokens)
        model = await self.model()
        self.max_model_len, self.num_layers = model.max_model_len, model.layers

    async def model(self) -> Model:
        """What it runs."""
        model, *_ = await self._transport.send(calls.models())
        return model

    async def tokenize(self, text: str, special: bool) -> TokenIds:
        """The ids of `text` in the server's model, with its special tokens in front if `special`."""
        return await self._transport.send(tokenize_call(text, special))

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        """A session of its own, closed at the end of the block."""
        async with await self._sessions.create() as session:
            yield session

    @asynccontextmanager
    async def imported(self, path: Path) -> AsyncIterator[AsyncSession]:
        """A session from an exported file, closed at the end of the block."""
        async with await self._sessions.import_from(path) as session:
            yield session

    async def answer(self, prompt: TokenIds, tokens: int) -> TokenIds:
        """What a session without breakpoints says."""
        async with self.session() as session:
            return (await session.generate(**greedy(prompt, tokens))).token_ids

    async def memory(self) -> MemoryMap:
        """Where the engine's memory is."""
        return await self._transport.send(calls.memory())

    async def histograms(self) -> dict[str, list[Bucket]]:
        """The server's own of `HISTOGRAMS`, as far as it has them."""
        metrics = await self.metrics()
        return {name: found for name in HISTOGRAMS if (found := read_buckets(metrics, name)) is not None}

    async def metrics(self) -> str:
        """The text of `/metrics`."""
        return await self._transport.send(METRICS)

    async def close(self) -> None:
        """Close every connection."""
        await self._transport.close()
