"""Attention on CUDA: our Triton kernels over the paged keys and values, and flash attention for new prompts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from app.gpu.kernels.attention.base import AttentionSpec, Batch
from app.gpu.kernels.attention.triton_paged import LEAST_ROWS, attend, store

HALVES = (torch.float16, torch.bfloat16)
FLASH_DIMS, FLASH_DIMS_STEP = 256, 8
"""What PyTorch's flash attention takes: heads of up to so many dimensions, and of multiples of so many."""
PROMPT_ROWS = 64
"""Height of a prompt's tiles in our own kernel, if flash attention takes such heads: others overfill the registers."""


class CudaAttention:
    """An `Attention`. Takes CUDA tensors of compute capability 8.0 or newer, and CPU tensors in Triton's interpreter.

    Decode rows, and padding (see `Batch`), attend in one launch of the Triton kernel; nothing of that depends on what
    the host knows of them, so it can be captured in a CUDA graph. All prompts attend in one more call:

    - in PyTorch's flash attention over their own keys and values, if they are float16 or bfloat16 with heads of up to
      `FLASH_DIMS` dimensions, the spec has no softcap and no sinks, none has a past, and the pool does not round them;
    - in the Triton kernel otherwise. PyTorch's flash attention reads pools in blocks of 256 tokens, if at all.

    `batch_invariant`: every row attends in the Triton kernel, in tiles of one height and with its keys in one piece,
    as `triton_paged` says. This rests on matrix products whose rows do not influence each other, which a test asks a
    CUDA device. It costs a prompt flash attention, and a small batch of long contexts the multiprocessors of splits.
    """

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self._batch_invariant = batch_invariant

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        query, key, value = _dense(query), _dense(key), _dense(value)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        decodes, starts, splits = batch.decodes, batch.prompt_starts, 1 if self._batch_invariant else None
        with torch.cuda.device_of(query):
            store(key, value, kv, batch.slot_blocks, batch.slot_offsets)
            if decodes:
                rows = query[:decodes], batch.block_tables[:decodes], batch.contexts[:decodes]
                attend(*rows, None, kv, spec, output[:decodes], rows=LEAST_ROWS, splits=splits)
            if starts is None:
                return output
            in_flash = not self._batch_invariant and query.dtype in HALVES and query.shape[2] <= FLASH_DIMS
            prompts = batch.rows[decodes:]
            is_kept = kv.dtype is query.dtype and all(row.length == row.context for row in prompts)
            if in_flash and is_kept and spec.softcap is None and spec.sinks is None:
                states, longest = [x[decodes:] for x in (query, key, value)], max(row.length for row in prompts)
                output[decodes:] = _attend_flash(states, starts, longest, spec)
            else:
                rows = query[decodes:], batch.block_tables[decodes:], batch.contexts[decodes:]
                height = PROMPT_ROWS if in_flash else LEAST_ROWS
                attend(*rows, starts, kv, spec, output[decodes:], rows=height, splits=splits)
        return output


def _dense(x: Tensor) -> Tensor:
    """`x` `[tokens, heads, head_dim]`, copied only if a head is not one run of memory."""
    return x if x.stride(2) == 1 else x.contiguous()


def _attend_flash(states: list[Tensor], starts: Tensor, longest: int, spec: AttentionSpec) -> Tensor:
    """Causal attention of prompts without a past, of at most `longest` tokens: their queries, keys and values. By the
    operator behind `torch.nn.attention.varlen`, whose own signature changes from release to release.
    """
    head_dim = states[0].shape[2]
    if head_dim % FLASH_DIMS_STEP:
        states = [F.pad(x, (0, -head_dim % FLASH_DIMS_STEP)) for x in states]
    attended: Tensor = torch.ops.aten._flash_attention_forward.default(
        *states,
        starts,
        starts,
        longest,
        longest,
        0.0,  # of dropout
        True,  # causal
        False,  # no mask for debugging
        scale=spec.scale,
        window_size_left=-1 if spec.window is None else spec.window - 1,
        window_size_right=0,
    )[0]
    return attended[..., :head_dim]
