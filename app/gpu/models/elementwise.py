"""What lies between a layer's matrix products: one fused kernel for each where it pays, else PyTorch's operators.

The kernels are imported where they are used: a GPU needs nothing of Numba, and a CPU nothing of Triton.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm (Zhang and Sennrich, arXiv:1910.07467) of `x` `[tokens, width]` times `weight` `[width]`.

    Or of each head of `x` `[tokens, heads, width]`, heads dense, times `weight` `[heads, width]`. Returns a new
    contiguous tensor.
    """
    if x.device.type == "cpu":
        from app.gpu.kernels.cpu import elementwise as cpu_elementwise

        return cpu_elementwise.rms_norm(x, weight, eps)
    from app.gpu.models import triton_elementwise

    return triton_elementwise.rms_norm(x, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm (Ba et al., arXiv:1607.06450) of `x` `[tokens, width]`, with `weight` and `bias` `[width]`."""
    if x.device.type == "cpu":
        from app.gpu.kernels.cpu import elementwise as cpu_elementwise

        return cpu_elementwise.layer_norm(x, weight, bias, eps)
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def gelu_(x: Tensor) -> Tensor:
    """`x` `[tokens, width]`, dense, of which each value has become its GELU as GPT-2 approximates it, with a tanh
    (Hendrycks and Gimpel, arXiv:1606.08415).
    """
    if x.device.type == "cpu":
        from app.gpu.kernels.cpu import elementwise as cpu_elementwise

        return cpu_elementwise.gelu_(x)
    return F.gelu(x, approximate="tanh")


def silu_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of `[..., 2 * inner]`, dense but for its first axis, the gate first: `[..., inner]` (Shazeer,
    arXiv:2002.05202).
    """
    if gate_up.device.type == "cpu":
        from app.gpu.kernels.cpu import elementwise as cpu_elementwise

        return cpu_elementwise.silu_mul(gate_up)
    from app.gpu.models import triton_elementwise

    return triton_elementwise.silu_mul(gate_up.flatten(0, -2)).view(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def gelu_mul(gate_up: Tensor) -> Tensor:
    """The same with `gelu_` of the gate."""
    if gate_up.device.type == "cpu":
        from app.gpu.kernels.cpu import elementwise as cpu_elementwise

        return cpu_elementwise.gelu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """The same with `gate * logistic(alpha * gate) * (up + 1)`, of gates of at most `limit` and ups within it, as
    gpt-oss has it.
    """
    if gate_up.device.type == "cpu":
        from app.gpu.kernels.cpu import elementwise as cpu_elementwise

        return cpu_elementwise.clamped_swiglu(gate_up, alpha, limit)
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1).mul_(gate * torch.sigmoid(gate * alpha))


def add_rms_norm(x: Tensor, other: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x` `[tokens, width]`, dense, to which `other` of the same shape has been added, and its `rms_norm`."""
    if x.device.type == "cpu":
        return (total := add_(x, other)), rms_norm(total, weight, eps)
    from app.gpu.models import triton_elementwise

    return triton_elementwise.add_rms_norm(x, other, weight, eps)


def add_(x: Tensor, other: Tensor) -> Tensor:
    """`x` `[tokens, width]`, dense, to which `other` has been added: one row for each token, or one for all."""
    if x.device.type == "cpu":
        from app.gpu.kernels.cpu import elementwise as cpu_elementwise

        return cpu_elementwise.add_(x, other)
    return x.add_(other)


def rotate(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    """Rotate the halves of each head of `x` `[tokens, heads, head_dim]`, heads dense, into a new contiguous tensor.

    `table` `[positions, rotated]` holds cosines, then sines, of half of the first `rotated` values of a head; others
    stay. `positions` is `[tokens]` int64. With `x = (a, b, c)`, `a` and `b` such halves, the result is
    `(a cos - b sin, b cos + a sin, c)` (Su et al., arXiv:2104.09864).
    """
    if x.device.type == "cpu":
        from app.gpu.kernels.cpu import elementwise as cpu_elementwise

        return cpu_elementwise.rotate(x, table, positions)
    from app.gpu.models import triton_elementwise

    return triton_elementwise.rotate(x, table, positions)


def gate_(x: Tensor, gates: Tensor) -> Tensor:
    """`x` `[tokens, width]`, dense, multiplied by a logistic function of `gates` of that shape, rows dense."""
    if x.device.type == "cpu":
        from app.gpu.kernels.cpu import elementwise as cpu_elementwise

        return cpu_elementwise.gate_(x, gates)
    return x.mul_(gates.float().sigmoid())


def multiply(x: Tensor, other: Tensor) -> Tensor:
    """`x` `[tokens, width]` times `other` of that shape, rows of both dense, or times `[width]`. Returns a new tensor
    of the type of `other`.
    """
    if x.device.type == "cpu":
        from app.gpu.kernels.cpu import elementwise as cpu_elementwise

        return cpu_elementwise.multiply(x, other)
    return (x * other).to(other.dtype)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` `[tokens, width]`, dense, as `dtype`."""
    if x.device.type == "cpu" and x.dtype is not dtype:
        from app.gpu.kernels.cpu import elementwise as cpu_elementwise

        return cpu_elementwise.rounded(x, dtype)
    return x.to(dtype)


def scale_(x: Tensor, factor: float) -> Tensor:
    """`x` `[tokens, width]`, dense, of which each value has been multiplied by `factor`."""
    if x.device.type == "cpu":
        from app.gpu.kernels.cpu import elementwise as cpu_elementwise

        return cpu_elementwise.scale_(x, factor)
    return x.mul_(factor)


def softcap_(x: Tensor, cap: float) -> Tensor:
    """`x` `[tokens, width]`, dense, of which each value `v` has become `cap * tanh(v / cap)`."""
    if x.device.type == "cpu":
        from app.gpu.kernels.cpu import elementwise as cpu_elementwise

        return cpu_elementwise.softcap_(x, cap)
    return x.div_(cap).tanh_().mul_(cap)
