"""The hand-written offload as a process beside the load generator, which never imports PyTorch itself."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from client import MemoryMap
from client.models import Model
from loadgen.errors import LoadgenError
from loadgen.experiments.resume_latency.plan import Cell, Sample, Way
from loadgen.load.prompts import TokenIds
from loadgen.peers.dtypes import ELEMENT_BYTES
from loadgen.processes.line_process import LineProcess, line_process

PROGRAM = Path(__file__).parents[2] / "rivals" / "pinned_offload.py"


class OffloadFailed(LoadgenError):
    """The hand-written offload ended or could not do what it was asked. The text says why."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the script must know of the model. `elements`: of K and V together, for each layer and token. `model`: the
    folder that Transformers loads it from, None if it is not to be run.
    """

    layers: int
    elements: int
    hidden_size: int
    dtype: str
    model: str | None

    @classmethod
    def of(cls, memory: MemoryMap, served: Model, dtype: str, folder: Path | None) -> Shape:
        """The shape that the server tells: its KV takes the same bytes.

        Raises `OffloadFailed` if the model in `folder` has another shape, or cannot be read.
        """
        token_bytes = memory.data.block_bytes // memory.data.block_tokens
        elements = token_bytes // served.layers // ELEMENT_BYTES[dtype]
        if folder is not None and _read_shape(folder) != (served.layers, elements, served.hidden_size):
            raise OffloadFailed(f"the model in {folder.name} is not of the shape of the server's: give another --model")
        return cls(served.layers, elements, served.hidden_size, dtype, None if folder is None else str(folder))


def _read_shape(folder: Path) -> tuple[int, int, int]:
    """Layers, elements of K and V in each for a token, and hidden size, by the folder's `config.json`."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
        kv_heads, size = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden_size // heads
        return config["num_hidden_layers"], 2 * kv_heads * size, hidden_size
    except (OSError, ValueError, KeyError) as error:
        raise OffloadFailed(f"reading the shape of the model in {folder.name} failed: {error!r}") from error


class HandWrittenOffload:
    """The running script. Everything raises `OffloadFailed` if it has ended."""

    def __init__(self, process: LineProcess) -> None:
        self._process = process

    async def describe(self, shape: Shape) -> str:
        """Tell it of the model; what it runs on."""
        answer = await self._process.ask(asdict(shape))
        return f"{answer['device']}, {answer['threads']} threads"

    async def prepare(self, history: TokenIds, first: int, layers: Sequence[int]) -> None:
        """Have it hold the session of that history whose last pass begins at position `first`."""
        await self._process.ask({"token_ids": history, "first": first, "after": list(layers)})

    async def restore(self, cell: Cell, repeat: int) -> Sample:
        """Bring back what was there after the cell's layer, of the session prepared last."""
        found = await self._process.ask({"layer": cell.layer})
        return Sample(
            Way.OFFLOAD,
            cell,
            repeat,
            standing_s=found["standing_s"],
            token_s=found["token_s"],
            token_id=found["token_id"],
            bytes=found["bytes"],
        )


@asynccontextmanager
async def hand_written_offload() -> AsyncIterator[HandWrittenOffload]:
    """The script, until the block ends."""
    async with line_process([sys.executable, str(PROGRAM)], OffloadFailed) as process:
        yield HandWrittenOffload(process)
