"""What lies between a layer's matrix products: one fused kernel for each where it pays, else PyTorch's operators.

The kernels are imported where they are used: a GPU needs nothing of Numba, and a CPU nothing of Triton.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

Operator = TypeVar("Operator", bound=Callable[..., Tensor])


def _ours_on_cpu(elsewhere: Operator) -> Operator:
    """A function that is the one of that name in `kernels.cpu.elementwise` where its first argument is on a CPU."""

    @wraps(elsewhere)
    def run(x: Tensor, *others: Any) -> Any:
        if x.device.type != "cpu":
            return elsewhere(x, *others)
        from app.gpu.kernels.cpu import elementwise

        return getattr(elementwise, elsewhere.__name__)(x, *others)

    return cast("Operator", run)


@_ours_on_cpu
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm (Zhang and Sennrich, arXiv:1910.07467) of `x` `[tokens, width]` times `weight` `[width]`.

    Or of each head of `x` `[tokens, heads, width]`, heads dense, times `weight` `[heads, width]`. Returns a new
    contiguous tensor.
    """
    from app.gpu.models import triton_elementwise

    return triton_elementwise.rms_norm(x, weight, eps)


@_ours_on_cpu
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm (Ba et al., arXiv:1607.06450) of `x` `[tokens, width]`, with `weight` and `bias` `[width]`."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


@_ours_on_cpu
def gelu_(x: Tensor) -> Tensor:
    """`x` `[tokens, width]`, dense, of which each value has become its GELU as GPT-2 approximates it, with a tanh
    (Hendrycks and Gimpel, arXiv:1606.08415).
    """
    return F.gelu(x, approximate="tanh")


@_ours_on_cpu
def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[..., 2 * inner]`, dense but for its first axis, the gate first: `[..., inner]` (Shazeer,
    arXiv:2002.05202).
    """
    from app.gpu.models import triton_elementwise

    return triton_elementwise.silu_mul(gate_up.flatten(0, -2)).view(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@_ours_on_cpu
def gelu_mul(gate_up: Tensor) -> Tensor:
    """The same with `gelu_` of the gate."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


@_ours_on_cpu
def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """The same with `gate * logistic(alpha * gate) * (up + 1)`, of gates of at most `limit` and ups within it, as
    gpt-oss has it.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1).mul_(gate * torch.sigmoid(gate * alpha))


def add_rms_norm(x: Tensor, other: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x` `[tokens, width]`, dense, to which `other` of the same shape has been added, and its `rms_norm`."""
    if x.device.type == "cpu":
        return (total := add_(x, other)), rms_norm(total, weight, eps)
    from app.gpu.models import triton_elementwise

    return triton_elementwise.add_rms_norm(x, other, weight, eps)


@_ours_on_cpu
def add_(x: Tensor, other: Tensor) -> Tensor:
    """`x` `[tokens, width]`, dense, to which `other` has been added: one row for each token, or one for all."""
    return x.add_(other)


@_ours_on_cpu
def rotate(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Rotate the halves of each head of `x` `[tokens, heads, head_dim]`, heads dense, into a new contiguous tensor.

    `table` `[positions, rotated]` holds cosines, then sines, of half of the first `rotated` values of a head; others
    stay. `positions` is `[tokens]` int64. With `x = (a, b, c)`, `a` and `b` such halves, the result is
    `(a cos - b sin, b cos + a sin, c)` (Su et al., arXiv:2104.09864).
    """
    from app.gpu.models import triton_elementwise

    return triton_elementwise.rotate(x, table, positions)


@_ours_on_cpu
def gate_(x: Tensor, gates: Tensor) -> Tensor:
    """`x` `[tokens, width]`, dense, multiplied by a logistic function of `gates` of that shape, rows dense."""
    return x.mul_(gates.float().sigmoid())


@_ours_on_cpu
def multiply(x: Tensor, other: Tensor) -> Tensor:
    """`x` `[tokens, width]` times `other` of that shape, rows of both dense, or times `[width]`. Returns a new tensor
    of the type of `other`.
    """
    return (x * other).to(other.dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` `[tokens, width]`, dense, as `dtype`."""
    if x.device.type == "cpu" and x.dtype is not dtype:
        from app.gpu.kernels.cpu import elementwise as cpu_elementwise

        return cpu_elementwise.rounded(x, dtype)
    return x.to(dtype)


@_ours_on_cpu
def scale_(x: Tensor, factor: float) -> Tensor:
    """`x` `[tokens, width]`, dense, of which each value has been multiplied by `factor`."""
    return x.mul_(factor)


@_ours_on_cpu
def softcap_(x: Tensor, cap: float) -> Tensor:
    """`x` `[tokens, width]`, dense, of which each value `v` has become `cap * tanh(v / cap)`."""
    return x.div_(cap).tanh_().mul_(cap)
