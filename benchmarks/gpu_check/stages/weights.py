"""A model several times larger than the device may hold, as large as host memory and time allow: bandwidth, first
token, and beside it Accelerate's offload to host memory, on a model of the same shape.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from accelerate import cpu_offload, init_empty_weights
from transformers import AutoModelForCausalLM, DynamicCache

from app.gpu.device.hardware import choose_device, choose_dtype
from app.gpu.device.streams import streams_of
from app.gpu.kernels.attention import attention_for
from app.gpu.kernels.linear import DenseLinear
from app.gpu.models import build_stack
from app.gpu.startup.loader import load_engine
from app.gpu.startup.weights import weight_bytes
from app.gpu.weights.bundles import StreamedWeights
from app.gpu.weights.checkpoint import weights_of
from app.machine.memory import read_host_memory
from app.model_store.resolve import ResolvedModel
from benchmarks.engine.live import LiveEngine, random_tokens
from benchmarks.engine.loading import find_model, live, make_settings, transformers_config
from benchmarks.gpu_check.journal import SkipStage, StageContext
from benchmarks.gpu_check.plan import StreamPlan
from benchmarks.gpu_check.stages.decode import StepTimes
from benchmarks.gpu_check.stages.moves import PlainCopies
from benchmarks.page_cache import dropped
from loadgen.errors import NotAsMeant
from loadgen.report.tables import Spread, Target

CPU = torch.device("cpu")
MAKING_SHARE = 0.4
"""Of the stage's time, for making the weights and their copy in host memory."""
MEMORY_SHARE = 0.85
"""Of the free host memory, for that copy."""
PROBE_BYTES = 1 << 30
FEWEST_LAYERS = 3


def make_large_model(context: StageContext) -> ResolvedModel:
    """A model of the planned shape, with as many of its layers as can be made; the record says how many.

    Raises `SkipStage` if that is hardly any.
    """
    plan = context.plan.streaming
    layer = _bytes_of(plan, 2) - _bytes_of(plan, 1)
    others = _bytes_of(plan, 1) - layer
    layers = layers_that_fit(plan.layers, layer, others, _room(context))
    if layers < min(FEWEST_LAYERS, plan.layers):
        raise SkipStage(f"neither memory nor time allow {FEWEST_LAYERS} layers of {layer / 1e9:.1f} GB")
    total = others + layers * layer
    context.journal.fact("model that is streamed", f"{plan.model} with {layers} layers, {total / 1e9:.2f} GB")
    if layers < plan.layers:
        planned = others + plan.layers * layer
        context.journal.note(f"Neither memory nor time allowed the {planned / 1e9:.0f} GB that were planned.")
    return with_layers(plan.model, layers)


def with_layers(name: str, layers: int) -> ResolvedModel:
    """A model with random weights that is lower, or higher, than its shape has it."""
    model = find_model(name)
    model.config.num_hidden_layers = layers
    return model


def layers_that_fit(planned: int, layer_bytes: int, other_bytes: int, room_bytes: float) -> int:
    """How many of the planned layers fit in the room beside what is no layer. Pure."""
    return max(0, min(planned, int((room_bytes - other_bytes) / layer_bytes)))


def _bytes_of(plan: StreamPlan, layers: int) -> int:
    model, weights = with_layers(plan.model, layers), StreamedWeights(CPU, torch.float32, DenseLinear)
    build_stack(model, weights_of(model, CPU, torch.float32, on_meta=True), weights, attention_for(CPU), None)
    return weights.layout.nbytes // torch.float32.itemsize * plan.element_bytes


def _room(context: StageContext) -> float:
    """Bytes of weights that host memory has room for, and that can be made in the time there is."""
    room = MEMORY_SHARE * read_host_memory().free_bytes
    if context.device == "cpu":
        return room
    return min(room, MAKING_SHARE * context.left_s * _bytes_made_per_s(context.device))


def _bytes_made_per_s(device: str) -> float:
    """How fast random weights are made on the device and copied to host memory that is pinned for them."""
    found = choose_device(device)
    streams = streams_of(found)
    weights = torch.empty(PROBE_BYTES // 2, dtype=choose_dtype("auto", found), device=found)
    torch.cuda.synchronize()
    began = time.perf_counter()
    slab = streams.host_slab((PROBE_BYTES,))
    slab.copy_(weights.normal_().view(torch.uint8))
    return PROBE_BYTES / (time.perf_counter() - began)


WEIGHT = 0.01
"""Of every parameter: copies and products take as long as with any other. Memory that nobody has written to would not
do: it is one page of zeros over and over, and that is in a cache.
"""


@dataclass(frozen=True, slots=True)
class Timed:
    """Of a batch: until every session has its first token, and from then on until one has its last."""

    first_s: float
    tokens_per_s: float
    steps_per_s: float

    @classmethod
    def of(cls, times: Sequence[Sequence[float]]) -> Timed:
        """When each token of each session came, in seconds from the start. Raises `NotAsMeant` if there is nothing in
        between.
        """
        begin, end = max(each[0] for each in times), min(each[-1] for each in times)
        counted = sum(1 for each in times for at in each if begin < at <= end)
        if not counted:
            raise NotAsMeant("one session had all of its tokens before another had its first: let there be more tokens")
        rate = counted / (end - begin)
        return cls(begin, rate, rate / len(times))


class Accelerate:
    """Transformers' `generate` on a model of the same shape, whose weights Accelerate keeps in host memory. A CPU
    computes there, and nothing would move: on a CPU they are read from the disk, from the model's own file in `folder`.
    """

    def __init__(self, model: ResolvedModel, device: str, folder: Path) -> None:
        self._target = choose_device(device)
        dtype, config, made = choose_dtype("auto", self._target), transformers_config(model), AutoModelForCausalLM
        self.model: Any
        if device == "cpu":
            made.from_config(config, dtype=dtype).save_pretrained(folder)
            self.model = made.from_pretrained(folder, dtype=dtype, device_map={"": "disk"}, offload_folder=folder)
        else:
            with init_empty_weights():
                empty: Any = made.from_config(config, dtype=dtype)
            weights = {name: torch.full(each.shape, WEIGHT, dtype=dtype) for name, each in empty.state_dict().items()}
            self.model = cpu_offload(empty, execution_device=self._target, state_dict=weights)
        self.model.eval().generation_config.eos_token_id = None

    @torch.no_grad()
    def time(self, prompt: list[int], tokens: int) -> Timed:
        """One session: a prompt, and a few tokens after it."""
        ids, times, began = torch.tensor([prompt], device=self._target), StepTimes(), time.perf_counter()
        asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "streamer": times, "do_sample": False}
        self.model.generate(**asked, max_new_tokens=tokens, pad_token_id=0)
        return Timed.of([[at - began for at in times.seconds]])


class DoubleBuffer:
    """What one writes by hand: Transformers' layers on one static batch, of whose weights the device has two layers'.
    While one is computed with, the next comes: on a CPU from a file by a thread, on CUDA from pinned memory on a stream
    of its own. Embedding and output projection stay on the device, beyond the budget.
    """

    def __init__(self, model: ResolvedModel, device: str, folder: Path) -> None:
        self._target = choose_device(device)
        config = deepcopy(transformers_config(model))
        self._count, config.num_hidden_layers = config.num_hidden_layers, BUFFERS
        with self._target:
            made = AutoModelForCausalLM.from_config(config, dtype=choose_dtype("auto", self._target))
        self._model: Any = made.eval()
        self._buffers = [_flat(layer) for layer in self._model.model.layers]
        self._bytes = self._buffers[0].nbytes
        if device == "cpu":
            self._file = (folder / "layers").open("w+b")
            for _ in range(self._count):
                self._file.write(self._buffers[0].numpy().data)
            self._file.flush()
            self._thread = ThreadPoolExecutor(1)
        else:
            self._host = torch.ones(PINNED_LAYERS, self._bytes, dtype=torch.uint8, pin_memory=True)
            self._stream = torch.cuda.Stream()
        self._coming = [self._bring(layer) for layer in range(BUFFERS)]

    def _bring(self, layer: int) -> Callable[[], object]:
        """Begin to copy a layer's weights into its buffer, once what was launched on it is over; returns what waits."""
        buffer = self._buffers[layer % BUFFERS]
        if self._target.type == "cpu":
            place = layer % self._count * self._bytes
            return self._thread.submit(os.preadv, self._file.fileno(), [buffer.numpy().data], place).result
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            buffer.copy_(self._host[layer % PINNED_LAYERS], non_blocking=True)
            there = self._stream.record_event()
        return partial(torch.cuda.current_stream().wait_event, there)

    def close(self) -> None:
        """Wait for what is read, and give the file back."""
        if self._target.type == "cpu":
            self._thread.shutdown()
            self._file.close()

    @torch.inference_mode()
    def time(self, prompt: list[int], tokens: int) -> Timed:
        """One session: a prompt, and a few tokens after it."""
        ids, cache, times, first = torch.tensor([prompt], device=self._target), DynamicCache(), list[float](), 0
        body, began = self._model.model, time.perf_counter()
        for _ in range(tokens):
            hidden = body.embed_tokens(ids)
            positions = torch.arange(first, first + ids.shape[1], device=self._target)[None]
            rotary = body.rotary_emb(hidden, positions)
            for layer in range(self._count):
                self._coming.pop(0)()
                module = body.layers[layer % BUFFERS]
                module.self_attn.layer_idx = layer
                hidden = module(hidden, position_embeddings=rotary, position_ids=positions, past_key_values=cache)
                self._coming.append(self._bring(layer + BUFFERS))
            first += ids.shape[1]
            ids = self._model.lm_head(body.norm(hidden[:, -1:])).argmax(-1)
            ids.cpu()
            times.append(time.perf_counter() - began)
        return Timed.of([times])


def _flat(layer: torch.nn.Module) -> torch.Tensor:
    """The layer's parameters as one run of bytes, of which they are parts from now on."""
    parameters = list(layer.parameters())
    buffer = torch.cat([each.detach().flatten() for each in parameters])
    for each, part in zip(parameters, buffer.split([each.numel() for each in parameters]), strict=True):
        each.data = part.view(each.shape)
    return buffer.view(torch.uint8)


class FileCopies:
    """Plain copies of a CPU: one thread reads what a pass streams, from the engine's file into two buffers in turn."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self._path, self._nbytes = path, nbytes
        self._buffers = torch.zeros(2, PIECE_BYTES, dtype=torch.uint8).numpy()

    def to_device(self, times: int = 1) -> float:
        """Bytes a second, in GB."""
        with self._path.open("rb") as file:
            began = time.perf_counter()
            for place, buffer in zip(
                [*range(0, self._nbytes, PIECE_BYTES)] * times, cycle(self._buffers), strict=False
            ):
                os.preadv(file.fileno(), [buffer[: self._nbytes - place].data], place)
            return times * self._nbytes / (time.perf_counter() - began) / 1e9


OF_PINNED = Target(0.9, at_least=True)
OVER_SWEEP = Target(1.3)
AHEAD = Target(1.0, at_least=True)
BLOCK_TOKENS, PIECE_BYTES = 16, 16 << 20
BUFFERS, PINNED_LAYERS = 2, 4
"""Layers on the device, and in pinned memory, which stand for all: a copy takes as long from any."""
PLAIN_COPIES = 4
"""At once, so that the end of one is not waited for before the next."""
ACCELERATE_S = 60.0
"""With less time left Accelerate is not begun: it makes the model, and copies it a few times from pageable memory."""
CHART = "Streamed weights"


def stage_weights(context: StageContext) -> None:
    """Djinn with every batch, in rounds with plain copies; then Accelerate, if there is time."""
    plan, model = context.plan.streaming, make_large_model(context)
    room = max(batch * (plan.prompt // batch + plan.tokens + 2 * BLOCK_TOKENS) for batch in plan.batches)
    with tempfile.TemporaryDirectory() as cache:
        settings = make_settings(
            context.device,
            plan.model,
            weights_device=plan.budget,
            cache_dir=cache,
            max_step_tokens=plan.prompt,
            max_running=max(plan.batches),
            kv_device=f"1x{room}",
            kv_policy="none",
        )
        with live(context, load_engine(model, settings.engine())) as engine:
            bench = _Bench(context, engine, list(Path(cache, "weights").glob("*.safetensors")))
            own = {batch: bench.measure(batch) for batch in plan.batches}
            if context.device == "cpu":
                cold = bench.measure(min(plan.batches), cold=True)
    del engine, bench
    gc.collect()
    if context.device == "cuda":
        torch.cuda.empty_cache()
        if missing := _missing_for_accelerate(context, model):
            context.journal.note(f"There was no {missing} left for Accelerate.")
            return
    prompt = random_tokens(Random(1), plan.prompt)
    with tempfile.TemporaryDirectory() as folder:
        with closing(DoubleBuffer(model, context.device, Path(folder))) as hand_written:
            hand_written.time(prompt[:1], 2)
            found = hand_written.time(prompt, plan.tokens)
        context.journal.value("Hand-written double buffer, tokens, batch 1", "tok/s", found.tokens_per_s)
        rate = own[min(own)].tokens_per_s / found.tokens_per_s
        context.journal.value("Djinn's tokens / those of the hand-written double buffer", "×", rate)
        del hand_written
        gc.collect()
        rival = Accelerate(model, context.device, Path(folder))
        rival.time(prompt[:1], 2)  # what is slow only once
        _report_accelerate(context, rival.time(prompt, plan.offload_tokens), own[min(own)])
        if context.device == "cpu":
            with dropped(list(Path(folder).glob("*.safetensors"))):
                found = rival.time(prompt, plan.offload_tokens)
            _report_accelerate(context, found, cold, ", cold")


@dataclass(frozen=True, slots=True)
class Own:
    """Medians of Djinn with one batch."""

    first_s: float
    tokens_per_s: float


class _Bench:
    def __init__(self, context: StageContext, engine: LiveEngine, files: list[Path]) -> None:
        self._context = context
        self._plan = context.plan.streaming
        self._engine = engine
        self._files = files
        self._random = Random(0)
        self._streamed = streamed_bytes(engine, self._plan)
        self._plain: PlainCopies | FileCopies = PlainCopies(self._plan.plain_bytes, context.device)
        if context.device == "cpu":
            self._plain = FileCopies(files[0], self._streamed)
        context.journal.fact("weights streamed in a pass", f"{self._streamed / 1e9:.2f} GB")

    def measure(self, batch: int, *, cold: bool = False) -> Own:
        """All rounds of a batch; `cold`: with nothing of the weights in the page cache."""
        self._time(batch)  # not kept: nothing shall be allocated or compiled under the clock
        copies_at_once = PLAIN_COPIES if self._context.device == "cuda" else 1
        with dropped(self._files if cold else []):
            rounds = [(self._plain.to_device(copies_at_once), self._time(batch)) for _ in range(self._plan.rounds)]
        journal, name = self._context.journal, f"batch {batch}{', cold' * cold}"
        rates = [self._streamed * found.steps_per_s / 1e9 for _, found in rounds]
        copies = [copy for copy, _ in rounds]
        firsts = [found.first_s for _, found in rounds]
        journal.samples(f"streamed weights, {name}, GB/s", rates)
        journal.samples(f"first token, {name}, s", firsts)
        shares = [rate / copy for rate, copy in zip(rates, copies, strict=True)]
        sweeps = [first * copy * 1e9 / self._streamed for first, copy in zip(firsts, copies, strict=True)]
        tokens = Spread.over([found.tokens_per_s for _, found in rounds])
        if not cold:
            journal.point(CHART, "Djinn", batch, tokens.median)
        # On a CPU larger batches compute for longer than their weights take to come.
        of_plain = OF_PINNED if batch == min(self._plan.batches) or self._context.device == "cuda" else None
        journal.figure(f"Streamed weights, {name}", "GB/s", Spread.over(rates))
        journal.figure(f"Streamed weights / plain copy, {name}", "×", Spread.over(shares), of_plain)
        journal.figure(f"First token of {self._plan.prompt} tokens of prompt, {name}", "s", Spread.over(firsts))
        target = OVER_SWEEP if batch == min(self._plan.batches) and self._context.device == "cuda" else None
        journal.figure(f"First token / one pass of plain copies, {name}", "×", Spread.over(sweeps), target)
        journal.figure(f"Tokens, {name}", "tok/s", tokens)
        return Own(median(firsts), tokens.median)

    def _time(self, batch: int) -> Timed:
        prompts = [random_tokens(self._random, self._plan.prompt // batch) for _ in range(batch)]
        turns = self._engine.generate_together(prompts, self._plan.tokens)
        began = turns[0].sent_at
        times = [[at - began for at in turn.times] for turn in turns]
        return Timed.of(times)


def streamed_bytes(live: LiveEngine, plan: StreamPlan) -> int:
    """What a pass brings to the device: all but what is kept there and the embedding, of which it needs some rows."""
    text, info = live.memory().text, live.info
    return text.total_bytes - text.kept_bytes - info.vocab_size * info.hidden_size * plan.element_bytes


def _missing_for_accelerate(context: StageContext, model: ResolvedModel) -> str:
    """What it lacks; empty if it lacks nothing."""
    if context.left_s < ACCELERATE_S:
        return "time"
    return "" if weight_bytes(model, torch.bfloat16) < MEMORY_SHARE * read_host_memory().free_bytes else "memory"


def _report_accelerate(context: StageContext, found: Timed, own: Own, cold: str = "") -> None:
    journal = context.journal
    if not cold:
        journal.point(CHART, "Accelerate", 1, found.tokens_per_s)
    journal.value(f"Accelerate, first token{cold}", "s", found.first_s)
    journal.value(f"Accelerate, tokens, batch 1{cold}", "tok/s", found.tokens_per_s)
    journal.value(f"Accelerate's time to the first token / Djinn's{cold}", "×", found.first_s / own.first_s, AHEAD)
    journal.value(f"Djinn's tokens / Accelerate's{cold}", "×", own.tokens_per_s / found.tokens_per_s, AHEAD)
