"""Layers on a CPU as programs: what a model launches is recorded once, and then run with one call.

Waking threads for each kernel of a layer of one token, and coming back to Python, takes about as long as the kernels.
So layers of a resident model are recorded, if they can be, with as many tokens as there may be, and each run tells the
kernels how many there are. A run stops at the points inside a layer at which something is done, and goes on from there.
"""

import ctypes
import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from app.domain.points import Point
from app.gpu.forward.graphs import layer_by_layer
from app.gpu.forward.inputs import FixedBatch
from app.gpu.kernels.attention.base import AttentionSpec, Batch, RowShape, Taps
from app.gpu.kernels.attention.cpu import PAGED_TOKENS, count_short, token_tables
from app.gpu.kernels.attention.cpu.prompts import Arrays, PromptArguments, place_prompts
from app.gpu.kernels.cpu import Launch, recorded_by
from app.gpu.kernels.cpu.launch import Program
from app.gpu.kv.pools import KVPool
from app.gpu.models.base import LayerStack

logger = logging.getLogger(__name__)

MOST_SHORT = 64
"""Tokens of a program that attend one query at a time: with more, products take most of the time anyway."""
_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_ZEROS = {_aten.zeros.default}


class NotRecordable(Exception):
    """The model computes something on a CPU that is no kernel of ours."""


class Arena:
    """Memory for tensors that live while layers are recorded: what one gives back, another gets. It never moves."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._free: list[tuple[int, int]] = []
        """Size and address of each block that is free, the smallest first."""

    def take(self, nbytes: int) -> Tensor:
        """`[nbytes]` uint8, aligned to a cache line. The memory is free again when no tensor shares it any more."""
        place = bisect_left(self._free, (nbytes, 0))
        if place == len(self._free):
            self._blocks.append(torch.empty(max(1, nbytes), dtype=torch.uint8))
            self._free.append((self._blocks[-1].numel(), self._blocks[-1].data_ptr()))
        size, address = self._free.pop(place)
        owner = (ctypes.c_uint8 * size).from_address(address)
        finalize(owner, insort, self._free, (size, address)).atexit = False
        return torch.frombuffer(owner, dtype=torch.uint8)[:nbytes]


def memory_of(tensor: Tensor) -> Callable[[int], Tensor]:
    """What is in the memory of so many first tokens of `tensor` `[tokens, ...]` when it is asked for. It is not kept:
    the arena may give its memory to others.
    """
    address, sizes, strides, dtype = tensor.data_ptr(), tensor.shape[1:], tensor.stride(), tensor.dtype

    def first(tokens: int) -> Tensor:
        shape = (tokens, *sizes)
        count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)

    return first


Tell = Callable[[Taps, int, Batch], None]
"""Tells taps of a point, of so many tokens of a batch."""


class Marks:
    """`Taps` that note where a layer's points are while it is recorded."""

    points = frozenset(Point)

    def __init__(self, launches: Sequence[Launch]) -> None:
        self._launches = launches
        self.found = list[tuple[int, Point, Tell]]()
        """Points in the order of the layer, each with the number of the launch before which it is."""

    def of_row(self, index: int) -> Taps:
        """Of rows by themselves nothing is recorded."""
        raise NotRecordable("its layers run row by row")

    def enter(self, hidden: Tensor) -> None:
        """The layer's input is no point inside it."""

    def __call__(self, point: Point, x: Tensor, order: Tensor | None = None) -> None:
        here = memory_of(x)
        self._note(point, lambda taps, tokens, batch: taps(point, here(tokens), order))

    def experts(self, ids: Tensor, weights: Tensor, count: int) -> None:
        """As `Taps` has it."""
        visited, shares = memory_of(ids), memory_of(weights)
        self._note(Point.EXPERTS, lambda taps, tokens, batch: taps.experts(visited(tokens), shares(tokens), count))

    def state(self, read: Callable[[Tensor], Tensor], states: Tensor) -> None:
        """As `Taps` has it, of the batch of the run."""

        def tell(taps: Taps, _tokens: int, batch: Batch) -> None:
            assert batch.states is not None
            taps.state(read, batch.states)

        self._note(Point.STATE, tell)

    def pattern(self, query: Tensor, kv: Tensor, batch: Batch, spec: AttentionSpec) -> None:
        """As `Taps` has it, of the batch of the run."""
        here = memory_of(query)
        self._note(Point.PATTERN, lambda taps, tokens, batch: taps.pattern(here(tokens), kv, batch, spec))

    def _note(self, point: Point, tell: Tell) -> None:
        self.found.append((len(self._launches), point, tell))


class Recording(TorchDispatchMode):
    """While it is active, the launches of the thread are kept, not run, and tensors are made in an arena. PyTorch's own
    operators that compute, or read a value, raise NotRecordable; `tolist` and `numpy` are none, and are not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[Launch] = []
        self.state: list[Tensor] = []
        """Tensors of zeros: their users leave them so, and find them so in the next replay."""
        self.starts: list[int] = []
        """Layer i is launches `[starts[i], starts[i + 1])`."""
        self.hidden: list[Tensor] = []
        """Layer i reads `hidden[i]`, and writes `hidden[i + 1]`. Other layers have something else in that memory."""
        self.marks: list[Sequence[tuple[int, Point, Tell]]] = []
        """Of each layer what `Marks` has found."""
        self._arena = Arena()

    def mark_boundary(self, hidden: Tensor) -> None:
        """What is recorded next is another layer, which reads `hidden` `[tokens, hidden_size]`."""
        self.starts.append(len(self.launches))
        self.hidden.append(memory_of(hidden)(len(hidden)))

    @contextmanager
    def within(self, arena: Arena) -> Iterator[None]:
        """Record, with tensors in `arena`."""
        self._arena = arena
        with recorded_by(self.launches.append), self:
            yield

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would import its compiler to keep it out of the mode: two seconds within the first decode step."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            memory = self._arena.take(result.untyped_storage().nbytes()).view(result.dtype)
            return memory.as_strided(result.shape, result.stride())
        if func in _ZEROS:
            self.state.append(result)
        elif func._schema.is_mutable or not _memory_of(result) or not _memory_of(result) <= _memory_of((args, kwargs)):
            raise NotRecordable(f"{func} computes")
        return result


def _memory_of(values: Any) -> set[int]:
    """Where the memory of all tensors in `values` begins. A view, and nothing else, has that of its argument."""
    return {each.untyped_storage().data_ptr() for each in tree_leaves(values) if isinstance(each, Tensor)}


class RecordedLayers:
    """A `RunLayers` on a CPU, in inference mode. It records layers for short rows, and for short rows and prompts."""

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
        call. `on_layer` is called before each layer of a step with prompts, or one without a program.
        """
        self._stack, self._pool, self._on_layer = stack, pool, on_layer
        self._layer_by_layer = layer_by_layer(stack, pool, on_layer)
        self._prompt_tokens, tokens = max_step_tokens, MOST_SHORT + max_step_tokens
        prompts, blocks = -(-max_step_tokens // (PAGED_TOKENS + 1)), -(-max_model_len // pool.block_size)
        self._inputs = FixedBatch(tokens, MOST_SHORT + prompts, blocks, stack.device, pool.groups)
        self._given, self._arena = torch.empty(tokens, stack.hidden_size, dtype=stack.dtype), Arena()
        self._alone = torch.arange(MOST_SHORT + prompts)[:, None, None]
        """The block of each row whose state is in one of its own."""
        self._placed: tuple[Tensor, Arrays] | None = None
        """Positions of the batch that the inputs are of, and what launches of its prompts work on."""
        # The one with the most tokens first: then the other needs no more memory.
        rows = [RowShape(token, 1, 1) for token in range(MOST_SHORT)]
        rows.append(RowShape(MOST_SHORT, max_step_tokens, max_step_tokens))  # all that is left is one prompt
        self._mixed = self._record("prompts", self._inputs.first(tokens, MOST_SHORT, tuple(rows)))
        self._short = self._record("decodes", self._inputs.first(MOST_SHORT, MOST_SHORT))

    def __call__(self, lo: int, hi: int, hidden: Tensor, batch: Batch) -> Tensor:
        """Run layers `[lo, hi)` on `hidden` `[tokens, hidden_size]`. The next run writes to the result's memory."""
        tokens, short = len(hidden), count_short(batch)
        prompts = batch.rows[short:]
        first = prompts[0].start if prompts else tokens
        recorded = self._mixed if prompts else self._short
        if (
            recorded is None
            or batch.adapters  # what they add is in no program
            or first > MOST_SHORT
            or tokens - first > self._prompt_tokens
            or any(row.length <= PAGED_TOKENS for row in prompts)
        ):
            return self._layer_by_layer(lo, hi, hidden, batch)
        program, recording = recorded
        here = recording.hidden[lo][:tokens]
        if here.data_ptr() != hidden.data_ptr():  # else the layers before have written it here
            here.copy_(hidden)
        if self._placed is None or self._placed[0] is not batch.positions:  # else these are the next layers of a step
            inputs = self._inputs
            inputs.positions[:tokens] = batch.positions
            inputs.slot_offsets[:tokens] = batch.slot_offsets
            for (slots, tables), group in zip(inputs.placed, batch.by_group(), strict=True):
                given, width = group.block_tables, group.block_tables.shape[1]
                slots[:tokens] = group.slot_blocks
                tables[:first, :width] = token_tables(group, short)
                tables[MOST_SHORT : MOST_SHORT + len(prompts), :width] = given[short:]
            program.set("queries", first)
            program.set("tokens", tokens)
            self._placed = batch.positions, self._place_prompts(program, recording, prompts) if prompts else ()
        if batch.states is not None:
            blocks = self._alone[: len(batch.states)] if batch.state_blocks is None else batch.state_blocks
            program.set("row_states", batch.states.data_ptr())
            program.set("state_bytes", batch.states.stride(0))
            program.set("state_rows", len(blocks))
            program.set("state_blocks", blocks.data_ptr())
            program.set("state_blocks_stride", blocks.stride(0))
            program.set("states_kept", blocks.shape[1])
            program.set("blocks_each", blocks.shape[2])
            program.set("state_decodes", batch.decodes)
            program.set("prompt_starts", 0 if batch.prompt_starts is None else batch.prompt_starts.data_ptr())
        if batch.taps is not None:  # of one layer
            self._run_tapped(program, recording, lo, batch.taps, tokens, batch)
        elif prompts:
            # One by one: it takes long, and the watch asks how far it is.
            for start, end in pairwise(recording.starts[lo : hi + 1]):
                if self._on_layer is not None:
                    self._on_layer()
                program.run(start, end)
        else:
            program.run(recording.starts[lo], recording.starts[hi])
        return recording.hidden[hi][:tokens]

    def _run_tapped(
        self, program: Program, recording: Recording, layer: int, taps: Taps, tokens: int, batch: Batch
    ) -> None:
        """Run a layer that stops at the points of `taps`."""
        start, group = recording.starts[layer], batch.by_group()[self._pool.group_of[layer]]
        if self._on_layer is not None:
            self._on_layer()
        for launch, point, tell in recording.marks[layer]:
            if point in taps.points:
                program.run(start, launch)
                start = launch
                tell(taps, tokens, group)
        program.run(start, recording.starts[layer + 1])

    def _place_prompts(self, program: Program, recording: Recording, rows: Sequence[RowShape]) -> Arrays:
        """Tell the program for prompts, if a layer attends to them, where these are. Returns what it then works on."""
        heads = next((given.heads for _, given in recording.launches if isinstance(given, PromptArguments)), None)
        if heads is None:
            return ()
        tables, stack = range(MOST_SHORT, MOST_SHORT + len(rows)), self._stack
        placed, memory = place_prompts(rows, tables, heads=heads, kv_heads=stack.kv_heads, head_dim=stack.head_dim)
        for field, number in placed.items():
            program.set(field, number)
        return memory

    def _record(self, what: str, batch: Batch) -> tuple[Program, Recording] | None:
        """None if the model, or its attention, needs other kernels for that."""
        recording, hidden = Recording(), self._given[: len(batch.positions)]
        recording.mark_boundary(hidden)
        if self._pool.state_room:  # each run says where its rows' states are; what stands for them is not touched
            states = torch.empty(len(batch.contexts), self._pool.state_room, dtype=torch.uint8)
            starts = torch.zeros(1, dtype=torch.int32)
            batch = replace(batch, states=states, state_blocks=self._alone, prompt_starts=starts)
        batches, group_of = batch.by_group(), self._pool.group_of
        try:
            for layer in range(self._stack.num_layers):
                marks = Marks(recording.launches)
                with recording.within(self._arena):
                    given = replace(batches[group_of[layer]], taps=marks)
                    hidden = self._stack.layer(layer, hidden, given, self._pool.layer(layer))
                recording.marks.append(marks.found)
                recording.mark_boundary(hidden)
        except NotRecordable as reason:
            logger.info("%s run without a program: %s", what, reason)
            return None
        return Program(recording.launches), recording
