"""One device's part: `python -m benchmarks.compile.child CAPABILITY main|every|few|usual` prints a JSON line a kernel.

A process of its own, as Triton knows one device, and compiles nothing where its interpreter has been chosen.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.compile.absent import absent_device
from benchmarks.compile.shapes import Shape, every_shape, few_shapes, launches, main_shapes, wide_launches
from benchmarks.compile.usage import usage_of

SHAPES: dict[str, Callable[[], list[Shape]]] = {
    "main": main_shapes,
    "every": every_shape,
    "few": few_shapes,
    "usual": lambda: [Shape()],
}


def rows(capability: int, shapes: list[Shape]) -> Iterator[dict[str, Any]]:
    """A row for each kernel in each shape, with what it is launched for."""
    compiled: dict[tuple[str, int], Any] = {}

    def note(name: str, kernel: Any) -> None:
        compiled[name, id(kernel)] = kernel

    with absent_device(capability, note):
        for shape, purpose, launch in _all_launches(shapes, capability):
            compiled.clear()
            launch()
            for (name, _), kernel in compiled.items():
                usage = asdict(usage_of(kernel, capability))
                yield {"capability": capability, "purpose": purpose, "kernel": name, **asdict(shape), **usage}


def _all_launches(shapes: list[Shape], capability: int) -> Iterator[tuple[Shape, str, Callable[[], object]]]:
    for shape in shapes:
        yield from ((shape, purpose, launch) for purpose, launch in launches(shape))
    for dtype in dict.fromkeys((*(shape.dtype for shape in shapes), "float32")):  # which takes most memory
        yield from ((Shape(dtype=dtype), purpose, launch) for purpose, launch in wide_launches(dtype, capability))


if __name__ == "__main__":
    for row in rows(int(sys.argv[1]), SHAPES[sys.argv[2]]()):
        print(json.dumps(row), flush=True)
