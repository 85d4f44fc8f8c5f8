"""`python -m loadgen.rivals.double_buffer`: reads JSON objects from stdin, a line each, answers each with one line.

`{"model", "dtype", "budget_bytes", "folder"}` comes first: a Transformers folder, how many bytes of weights the device
may have, and a folder for the file that they are read from on a CPU. `{"prompts", "tokens"}` then generates so many
tokens greedily after prompts of one length; `{"passes"}` only copies what so many passes stream.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loadgen.rivals.double_buffer.feeds import BUFFERS, KeptAndStreamed, Span, Stream
from loadgen.rivals.double_buffer.file_stream import FileStream
from loadgen.rivals.double_buffer.llama import Llama
from loadgen.rivals.double_buffer.pinned_stream import PinnedStream

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FILE = "bundles"


class DoubleBuffer:
    """A model within its budget: two buffers, and as many layers as fit besides them stay on the device."""

    def __init__(self, asked: dict[str, Any]) -> None:
        budget: int = asked["budget_bytes"]
        self._model = Llama(Path(asked["model"]), getattr(torch, asked["dtype"]), DEVICE)
        sizes = [layout.nbytes for layout in self._model.layouts]
        room = budget - BUFFERS * max(sizes)
        if room < 0:
            raise SystemExit(f"two buffers of {max(sizes)} bytes do not fit in {budget}")
        if sum(sizes) <= budget:
            raise SystemExit(f"all {sum(sizes)} bytes fit in {budget}: there is nothing to stream")
        kept = dict.fromkeys(spread(self._model.num_layers, room // max(sizes)), torch.empty(0))
        streamed = [size for index, size in enumerate(sizes) if index not in kept]
        self.streamed_bytes, self.kept_bytes = sum(streamed), sum(sizes) - sum(streamed)
        self._stream = _store(self._put_aside(kept), streamed, Path(asked["folder"]))
        self._feed = KeptAndStreamed(kept, self._stream)

    def _put_aside(self, kept: dict[int, Tensor]) -> Iterator[Tensor]:
        """The bundles that are streamed; the others are put into `kept` on the way."""
        for index, bundle in enumerate(self._model.bundles()):
            if index in kept:
                kept[index] = bundle.to(DEVICE)
            else:
                yield bundle

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """The tokens of every prompt, and the seconds until each of them was there."""
        ids = torch.tensor(prompts)
        kv = self._model.new_kv(len(prompts), ids.shape[1] + tokens)
        first, answers, seconds = 0, list[list[int]](), list[float]()
        began = time.perf_counter()
        for _ in range(tokens):
            length = ids.shape[1]
            ids = self._model.step(ids, first, kv, self._feed).cpu()
            first += length
            answers.append(ids[:, 0].tolist())
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds, "token_ids": list(zip(*answers, strict=True))}

    def copy(self, passes: int) -> dict[str, Any]:
        """Bytes and seconds of the copies alone."""
        return {"bytes": passes * self.streamed_bytes, "seconds": self._stream.time_copies(passes)}


def spread(layers: int, count: int) -> list[int]:
    """So many of the layers, but at most all, evenly: while one of them computes, the next copy goes on."""
    count = min(count, layers)
    return [(2 * number + 1) * layers // (2 * count) for number in range(count)]


def _store(bundles: Iterator[Tensor], sizes: list[int], folder: Path) -> Stream:
    """Put the bundles where they are streamed from."""
    spans = [Span(sum(sizes[:index]), size) for index, size in enumerate(sizes)]
    if DEVICE.type == "cuda":
        host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
        for span, bundle in zip(spans, bundles, strict=True):
            host[span.offset : span.offset + span.nbytes] = bundle
        return PinnedStream(host, spans, DEVICE)
    with (folder / FILE).open("wb") as file:
        for bundle in bundles:
            file.write(bundle.numpy().data)
    return FileStream(folder / FILE, spans)


def answers(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """One for each line."""
    streaming = DoubleBuffer(json.loads(next(lines)))
    yield {
        "device": DEVICE.type,
        "threads": torch.get_num_threads(),
        "kept_bytes": streaming.kept_bytes,
        "streamed_bytes": streaming.streamed_bytes,
    }
    for line in lines:
        asked = json.loads(line)
        if "passes" in asked:
            yield streaming.copy(asked["passes"])
        else:
            yield streaming.generate(asked["prompts"], asked["tokens"])


if __name__ == "__main__":
    for answer in answers(iter(sys.stdin)):
        print(json.dumps(answer), flush=True)
