"""A Numba kernel that writes keys and values of a batch into their places in the paged pool, on PyTorch's threads."""

import ctypes
import functools
from typing import Any, ClassVar

import numpy as np
import torch
from numba.np.numpy_support import carray
from torch import Tensor

from app.gpu.kernels.attention.cpu.rounding import rounding_kernel
from app.gpu.kernels.attention.pool_rows import FLOAT8
from app.gpu.kernels.cpu.compile import ELEMENTS, c_function
from app.gpu.kernels.cpu.intrinsics import convert, fetch_add, pointer
from app.gpu.kernels.cpu.openmp import run_on_torch_threads


class _Arguments(ctypes.Structure):
    """What the kernel reads: see `store`. Tensors are given by address; strides count elements. `next_chunk` counts the
    chunks of `chunk` tokens that threads have drawn.
    """

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("next_chunk", "chunk", "tokens", "kv_heads", "head_dim", "columns")),
        *((name, ctypes.c_int64) for name in ("key", "key_stride", "value", "value_stride")),
        *((name, ctypes.c_int64) for name in ("pool", "block_stride", "value_offset", "head_stride")),
        *((name, ctypes.c_int64) for name in ("blocks", "offsets")),
    ]


_ARGUMENTS = np.dtype(_Arguments)
_UNBOUNDED = 1 << 60
_CHUNK_ELEMENTS = 8192


def store(key: Tensor, value: Tensor, kv: Tensor, blocks: Tensor, offsets: Tensor) -> None:
    """Write token `i` of `key` and `value`, `[tokens, kv_heads, head_dim]` each with dense heads, to place `offsets[i]`
    of block `blocks[i]`, `[tokens]` int64 each, of `kv`: one layer's `[blocks, 2, kv_heads, block_size, columns]`.
    `key` and `value` have one dtype, and are rounded to that of the pool, to nearest even. No two tokens have the same
    place.
    """
    assert key.dtype == value.dtype  # the kernel trusts the addresses
    tokens, kv_heads, head_dim = key.shape
    block_stride, value_offset, head_stride, *_ = kv.stride()
    arguments = _Arguments(
        chunk=max(1, _CHUNK_ELEMENTS // (kv_heads * head_dim)),
        tokens=tokens,
        kv_heads=kv_heads,
        head_dim=head_dim,
        columns=kv.shape[4],
        key=key.data_ptr(),
        key_stride=key.stride(0),
        value=value.data_ptr(),
        value_stride=value.stride(0),
        pool=kv.data_ptr(),
        block_stride=block_stride,
        value_offset=value_offset,
        head_stride=head_stride,
        blocks=blocks.data_ptr(),
        offsets=offsets.data_ptr(),
    )
    kernel = rounding_kernel(key.dtype, _ARGUMENTS) if kv.dtype is FLOAT8 else _compiled(key.dtype, kv.dtype)
    run_on_torch_threads(kernel.address, arguments)


@functools.cache
def _compiled(dtype: torch.dtype, pool_dtype: torch.dtype) -> Any:
    """The kernel for keys and values of `dtype`, as a C function of the address of an `_Arguments`."""
    element: Any = ELEMENTS[dtype]
    kept: Any = ELEMENTS[pool_dtype]

    def kernel(address: int) -> None:
        a = carray(pointer(address), 1, _ARGUMENTS)[0]
        keys = carray(pointer(a.key), _UNBOUNDED, element)
        values = carray(pointer(a.value), _UNBOUNDED, element)
        pool = carray(pointer(a.pool), _UNBOUNDED, kept)
        blocks = carray(pointer(a.blocks), _UNBOUNDED, np.int64)
        offsets = carray(pointer(a.offsets), _UNBOUNDED, np.int64)
        while True:
            first = fetch_add(address) * a.chunk
            if first >= a.tokens:
                return
            for token in range(first, min(first + a.chunk, a.tokens)):
                slot = blocks[token] * a.block_stride + offsets[token] * a.head_dim
                for head in range(a.kv_heads):
                    to = slot + head * a.head_stride
                    for i in range(a.head_dim):
                        key = keys[token * a.key_stride + head * a.head_dim + i]
                        value = values[token * a.value_stride + head * a.head_dim + i]
                        pool[to + i] = convert(key, pool[to + i])
                        pool[to + a.value_offset + i] = convert(value, pool[to + a.value_offset + i])

    return c_function(kernel)
