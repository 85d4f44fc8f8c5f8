"""Layers of a resident model as programs; whatever they cannot do runs as it always has."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from app.gpu.forward.program_inputs import MOST_SHORT, Inputs
from app.gpu.forward.program_recording import Arena, NotRecordable, Recording, outliving
from app.gpu.forward.program_run import layer_by_layer
from app.gpu.kernels.attention.batch import Batch, RowShape
from app.gpu.kernels.attention.cpu.paged import count_short
from app.gpu.kernels.attention.cpu.prompts import PlacedPrompts, PromptArguments
from app.gpu.kernels.cpu.program import Program
from app.gpu.kv.pools import KVPool
from app.gpu.models.base import LayerStack

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A program of all layers; layer i is launches `[starts[i], starts[i + 1])`, and reads `hidden[i]`. Other layers
    have something else in that memory.
    """

    program: Program
    starts: list[int]
    hidden: list[Tensor]
    state: list[Tensor]
    heads: int
    """Of queries, where prompts attend; else 0."""


class RecordedLayers:
    """A `RunLayers` on a CPU, in inference mode. It records layers once for short rows, and once for prompts beside
    them. Before each run it tells the program how many there are.
    """

    @torch.inference_mode()
    def __init__(
        self,
        stack: LayerStack,
        pool: KVPool,
        max_model_len: int,
        max_step_tokens: int,
        on_layer: Callable[[], None] | None = None,
    ) -> None:
        """`stack` keeps its weights where they are; `max_model_len` bounds positions, `max_step_tokens` the tokens of a
        call. `on_layer` is called before each layer of prompts, and before each one that runs without a program.
        """
        self._stack, self._pool, self._on_layer = stack, pool, on_layer
        self._layer_by_layer = layer_by_layer(stack, pool, on_layer)
        blocks = -(-max_model_len // pool.block_size)
        self._inputs = Inputs(max_step_tokens, blocks, stack.hidden_size, stack.dtype)
        self._arena = Arena()
        # The one with the most tokens first: then the other needs no memory of its own.
        self._mixed = self._record("prompts", *self._inputs.mixed())
        self._short = self._record("decodes", *self._inputs.short())

    def __call__(self, lo: int, hi: int, hidden: Tensor, batch: Batch) -> Tensor:
        """See `RunLayers`."""
        short = count_short(batch)
        has_prompts = short < len(batch.rows)
        recorded = self._mixed if has_prompts else self._short
        if recorded is None or not self._inputs.have_room(batch, short):
            return self._layer_by_layer(lo, hi, hidden, batch)
        tokens, program = len(hidden), recorded.program
        recorded.hidden[lo][:tokens] = hidden
        program.set("queries", self._inputs.fill(batch, short))
        program.set("tokens", tokens)
        if has_prompts:
            self._run_prompts(recorded, lo, hi, batch.rows[short:])
        else:
            program.run(recorded.starts[lo], recorded.starts[hi])
        return recorded.hidden[hi][:tokens]

    def _run_prompts(self, recorded: _Recorded, lo: int, hi: int, rows: Sequence[RowShape]) -> None:
        """Run the layers of the program for prompts one by one: it takes long, and the watch asks how far it is."""
        stack = self._stack
        placed = PlacedPrompts(
            rows,
            range(MOST_SHORT, MOST_SHORT + len(rows)),
            heads=recorded.heads,
            kv_heads=stack.kv_heads,
            head_dim=stack.head_dim,
        )
        for field, number in placed.arguments().items():
            recorded.program.set(field, number)
        for start, end in pairwise(recorded.starts[lo : hi + 1]):
            if self._on_layer is not None:
                self._on_layer()
            recorded.program.run(start, end)

    def _record(self, what: str, hidden: Tensor, batch: Batch) -> _Recorded | None:
        """None if the model, or its attention, needs other kernels for that."""
        recording = Recording()
        starts, stream = [0], [hidden]
        try:
            for layer in range(self._stack.num_layers):
                with recording.within(self._arena):
                    hidden = self._stack.layer(layer, hidden, batch, self._pool.layer(layer))
                stream.append(outliving(hidden))
                starts.append(len(recording.launches))
        except NotRecordable as reason:
            logger.info("%s run without a program: %s", what, reason)
            return None
        launched = (each.arguments for each in recording.launches)
        heads = next((each.heads for each in launched if isinstance(each, PromptArguments)), 0)
        return _Recorded(Program(recording.launches), starts, stream, recording.state, heads)
