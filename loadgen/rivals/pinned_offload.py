"""Hand-written offload of one session's KV, to hold a server against: what an expert would write for one session alone.

A program of its own: it reads JSON objects from stdin, a line each, and answers with one line each. No server, no
blocks, no other sessions: one contiguous buffer in host memory, pinned where there is CUDA, one as large on the device,
both allocated and touched, a single copy on a stream of its own, and everything done once before anything is timed.

`{"layers", "elements", "hidden_size", "dtype", "model"}` comes first: `elements` is of K and V together, for each layer
and token. With `model`, a folder that Transformers can load, the pass also goes on to the next token.
`{"token_ids", "first", "after"}` prepares a session: positions before `first` have been through all layers, the others
up to each layer of `after`. `{"layer"}` then brings back all that the pass has had when it stood after that layer.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Continuation:
    """A model of Transformers whose decoder has `embed_tokens`, `layers` and `norm`, as Llama's has."""

    def __init__(self, folder: str, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        load: Any = AutoModelForCausalLM.from_pretrained
        self.model = load(folder, dtype=dtype).to(DEVICE).eval()
        self._body = self.model.get_decoder()
        self._layers, self._norm = self._body.layers, self._body.norm
        self._body.norm = torch.nn.Identity()

    def embed(self, token_ids: list[int]) -> Tensor:
        """The residual stream below layer 0, `[1, tokens, hidden]`."""
        hidden: Tensor = self._body.embed_tokens(torch.tensor([token_ids], device=DEVICE))
        return hidden

    def run(self, hidden: Tensor, low: int, high: int, past: Tensor) -> tuple[Tensor, Tensor]:
        """Take `hidden` through layers `[low, high)`; returns it and their new KV, `[layers, 2, heads, tokens, size]`.

        `past` has the KV of the positions before, `[all layers, 2, heads, before, size]`.
        """
        from transformers import DynamicCache

        cache: Any = DynamicCache()
        before = past.shape[3]
        if before:
            for layer, (keys, values) in enumerate(past[low:high]):
                cache.update(keys[None], values[None], layer)
        self._body.layers = self._layers[low:high]
        for index, layer in enumerate(self._body.layers):
            layer.self_attn.layer_idx = index
        positions = torch.arange(before, before + hidden.shape[1], device=DEVICE)[None]
        hidden = self._body(inputs_embeds=hidden, past_key_values=cache, position_ids=positions).last_hidden_state
        new = [torch.cat((one.keys, one.values))[:, :, before:] for one in cache.layers]
        return hidden, torch.stack(new)

    def next_token(self, hidden: Tensor) -> int:
        """What the model says after the last position, greedily."""
        return int(self.model.lm_head(self._norm(hidden[:, -1])).argmax())


class Snapshot:
    """A session in host memory, and the memory of the device that it comes back to."""

    def __init__(self, shape: dict[str, Any], model: Continuation | None, session: dict[str, Any]) -> None:
        self._model = model
        self._layers: int = shape["layers"]
        self._first: int = session["first"]
        self._tokens: int = len(session["token_ids"]) - self._first
        self._row: int = shape["elements"]
        dtype: torch.dtype = getattr(torch, shape["dtype"])
        self._hidden = {after: _host(self._tokens * shape["hidden_size"], dtype) for after in session["after"]}
        self._host = _host(self._count(self._layers - 1), dtype)
        self._back = torch.zeros(self._host.shape, dtype=dtype, device=DEVICE)
        self._hidden_back = torch.zeros(self._tokens * shape["hidden_size"], dtype=dtype, device=DEVICE)
        self._heads, self._size = 1, self._row // 2
        self._stream = torch.cuda.Stream() if DEVICE.type == "cuda" else None
        if model is not None:
            self._compute(model, session["token_ids"])
        self.restore(min(self._hidden))  # what is slow only once is not timed

    def restore(self, after: int) -> dict[str, Any]:
        """Bring back what the pass has had after that layer; with a model, go on to the next token."""
        count = self._count(after)
        self._back.zero_()
        _synchronize()
        began = time.perf_counter()
        on_stream: AbstractContextManager[Any] = (
            nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        )
        with on_stream:
            self._back[:count].copy_(self._host[:count], non_blocking=True)
            self._hidden_back.copy_(self._hidden[after], non_blocking=True)
        _synchronize()
        answer: dict[str, Any] = {"standing_s": time.perf_counter() - began, "token_s": None, "token_id": None}
        if self._model is not None:
            hidden = self._hidden_back.view(1, self._tokens, -1)
            if after + 1 < self._layers:
                hidden, _ = self._model.run(hidden, after + 1, self._layers, self._past(self._back))
            answer["token_id"] = self._model.next_token(hidden)
            answer["token_s"] = time.perf_counter() - began
        return {**answer, "bytes": count * self._back.element_size()}

    def _count(self, after: int) -> int:
        """Elements of all layers of the positions before the pass, and then of the pass up to that layer."""
        return self._row * (self._layers * self._first + (after + 1) * self._tokens)

    def _past(self, buffer: Tensor) -> Tensor:
        count = self._row * self._layers * self._first
        return buffer[:count].view(self._layers, 2, self._heads, self._first, self._size)

    def _compute(self, model: Continuation, token_ids: list[int]) -> None:
        """Fill the host memory with the KV and the residual streams of a real pass."""
        config = model.model.config
        self._heads = config.num_key_value_heads
        self._size = self._row // 2 // self._heads
        past = self._past(self._back)
        if self._first:
            _, found = model.run(model.embed(token_ids[: self._first]), 0, self._layers, past[:, :, :, :0])
            past.copy_(found)
            self._past(self._host).copy_(found)
        hidden, low, end = model.embed(token_ids[self._first :]), 0, self._count(-1)
        for high in sorted({*(after + 1 for after in self._hidden), self._layers}):
            hidden, found = model.run(hidden, low, high, past)
            self._host[end : end + found.numel()].copy_(found.flatten())
            if high - 1 in self._hidden:
                self._hidden[high - 1].copy_(hidden.flatten())
            low, end = high, end + found.numel()


def _host(count: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(count, dtype=dtype, pin_memory=DEVICE.type == "cuda")


def _synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def answers(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """One for each line."""
    shape = json.loads(next(lines))
    model = Continuation(shape["model"], getattr(torch, shape["dtype"])) if shape["model"] else None
    yield {"device": DEVICE.type, "threads": torch.get_num_threads()}
    snapshot: Snapshot | None = None
    for line in lines:
        asked = json.loads(line)
        if "token_ids" in asked:
            snapshot = None  # its memory is free before more is taken
            snapshot = Snapshot(shape, model, asked)
            yield {}
        else:
            assert snapshot is not None
            yield snapshot.restore(asked["layer"])


if __name__ == "__main__":
    with torch.inference_mode():
        for answer in answers(iter(sys.stdin)):
            print(json.dumps(answer), flush=True)
