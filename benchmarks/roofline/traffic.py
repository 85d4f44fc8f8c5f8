"""What a launch moves and computes: bytes read and written, floating-point operations.

Each number that a kernel needs is counted once, as if a cache kept it for the kernel and nothing for the next one.
Positions, block tables and other integers are left out where a kernel of ours has them beside its numbers. Operations
are those of matrix products and attention, without what a tile computes in vain: others come near no bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from benchmarks.roofline.launches import Launch

Named = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Traffic:
    """`read` and `written` in bytes."""

    read: int
    written: int
    flops: int = 0


def traffic_of(launch: Launch, context: int) -> Traffic:
    """What the launch does in a step whose rows see `context` tokens each. Raises KeyError for a Triton kernel that is
    not known here.
    """
    if not launch.results:
        return _TRITON[launch.kernel](launch.arguments, context)
    named, written = launch.arguments, _bytes(launch.results)
    match launch.kernel:
        case "linear":
            flops = 2 * named["input"].numel() * named["weight"].shape[0]
            return Traffic(named["input"].nbytes + named["weight"].nbytes, written, flops)
        case "embedding" | "index" | "gather" | "searchsorted":
            return Traffic(written, written)  # of the table only what is asked for
        case "copy_":
            return Traffic(named["src"].nbytes, written)
        case "fill_":
            return Traffic(0, written)
        case "index_copy_":
            return Traffic(named["source"].nbytes, named["source"].nbytes)
    return Traffic(_bytes(each for each in named.values() if isinstance(each, Tensor)), written)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(each.nbytes for each in tensors)


def _rotate(named: Named, context: int) -> Traffic:
    x, table = named["x"], named["table"]
    return Traffic(x.nbytes + x.shape[0] * table[0].nbytes, named["out"].nbytes)


def _store(named: Named, context: int) -> Traffic:
    new = _bytes((named["key"], named["value"]))
    return Traffic(new, new)


def _attend(named: Named, context: int) -> Traffic:
    query, pool = named["query"], named["pool"]
    tokens, heads, head_dim = query.shape
    kv = 2 * tokens * context * pool.shape[2] * head_dim * pool.element_size()
    written = _bytes(_parts(named) if named["sums"] is not None else (named["output"],))
    return Traffic(query.nbytes + kv, written, 2 * 2 * tokens * heads * head_dim * context)


def _merge(named: Named, context: int) -> Traffic:
    return Traffic(_bytes(_parts(named)), named["output"].nbytes)


def _parts(named: Named) -> tuple[Tensor, ...]:
    """As if every split had keys."""
    return named["sums"], named["peaks"], named["totals"]


def _silu_mul(named: Named, context: int) -> Traffic:
    return Traffic(named["gate_up"].nbytes, named["out"].nbytes)


def _rms_norm(named: Named, context: int) -> Traffic:
    return Traffic(_bytes((named["x"], named["weight"])), named["normed"].nbytes)


def _add_rms_norm(named: Named, context: int) -> Traffic:
    x = named["x"].nbytes
    return Traffic(x + _bytes((named["other"], named["weight"])), x + named["normed"].nbytes)


def _draw(named: Named, context: int) -> Traffic:
    return Traffic(named["probabilities"].nbytes, named["chosen"].nbytes)


_TRITON: dict[str, Callable[[Named, int], Traffic]] = {
    **{each.__name__: each for each in (_rotate, _store, _attend, _merge, _silu_mul, _rms_norm, _add_rms_norm, _draw)},
    "_draw_any": _draw,
}
