"""Attention on CUDA: single queries in a Triton kernel over the paged keys and values, prompts in flash attention."""

import torch
import torch.nn.functional as F
from torch import Tensor

from app.gpu.kernels.attention.base import AttentionSpec
from app.gpu.kernels.attention.batch import Batch, RowShape
from app.gpu.kernels.attention.pool_rows import FLOAT8, from_rows
from app.gpu.kernels.attention.triton_attend import LEAST_ROWS, Sequences, attend
from app.gpu.kernels.attention.triton_merge import MAX_SPLITS
from app.gpu.kernels.attention.triton_store import store

HALVES = (torch.float16, torch.bfloat16)
FLASH_DIMS, FLASH_DIMS_STEP = 256, 8
"""What PyTorch's flash attention takes: heads of up to so many dimensions, and of multiples of so many."""
PROMPT_ROWS = 64
"""Height of a prompt's tiles in our own kernel, where bit-identity asks for no other, and for heads that flash
attention takes: the matrices of float32 or of wider heads would not fit into the registers."""
SPLIT_KEYS = 128
"""Least keys of a split: two tiles of a head of 128. Chosen by reasoning, not tuned on a device."""
PROGRAMS_PER_PROCESSOR = 4
"""Programs that a decode is split into, for each of the device's multiprocessors: going by its registers, about as many
run at a time on Hopper. Not tuned on a device either."""


class CudaAttention:
    """See `Attention`. Takes CUDA tensors of compute capability 8.0 or newer, and CPU tensors in Triton's interpreter.
    The pool has the dtype of the queries, or a half type under float32, or float8; keys and values are widened as they
    are read.

    Decode rows, one token each, attend in the Triton kernel; nothing of that depends on what the host knows of their
    contexts, so it can be captured in a CUDA graph. Padding rows (see `Batch`) are welcome there. Prompts, one row at a
    time, attend

    - in PyTorch's flash attention, if they are float16 or bfloat16 with heads of up to `FLASH_DIMS` dimensions, the
      spec has no softcap, and the window does not end inside the context: over the row's own keys and values if it has
      no past and the pool does not round them, else over its gathered blocks;
    - in the Triton kernel otherwise.

    `batch_invariant`: every row attends in the Triton kernel, in tiles of one height and with its keys in one piece.
    The result of a token is then the same to the bit in whatever batch it comes, at whatever place in it, in whichever
    blocks its keys are, and whether it comes alone or in a prompt cut into chunks of any lengths. This rests on matrix
    products whose rows do not influence each other; a test asks a CUDA device whether its own are such. It costs a
    prompt the speed of flash attention, and a small batch of long contexts the multiprocessors that splitting would
    have given it.
    """

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self._batch_invariant = batch_invariant

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kv: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        query, key, value = _dense(query), _dense(key), _dense(value)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        decodes = batch.decodes
        with torch.cuda.device_of(query):
            store(key, value, kv, batch.slot_blocks, batch.slot_offsets)
            if decodes:
                rows = Sequences(query[:decodes], batch.block_tables[:decodes], batch.contexts[:decodes], length=1)
                splits = 1 if self._batch_invariant else _splits(rows, kv, spec)
                attend(rows, kv, spec, output[:decodes], rows=LEAST_ROWS, splits=splits)
            for index, row in enumerate(batch.rows[decodes:], decodes):
                tokens, table = slice(row.start, row.start + row.length), batch.block_tables[index]
                if self._batch_invariant or not _flash_takes(query, row, spec):
                    rows = Sequences(query[tokens], table[None], batch.contexts[index : index + 1], row.length)
                    tall = _flash_takes_heads(query) and not self._batch_invariant
                    attend(rows, kv, spec, output[tokens], rows=PROMPT_ROWS if tall else LEAST_ROWS, splits=1)
                else:
                    keys, values = _context(row, key[tokens], value[tokens], kv, table)
                    output[tokens] = _attend_flash(query[tokens], keys, values, spec)
        return output


def batch_invariant_attention() -> CudaAttention:
    """Registered as `cuda-batch-invariant`."""
    return CudaAttention(batch_invariant=True)


def _dense(x: Tensor) -> Tensor:
    """`x` `[tokens, heads, head_dim]`, copied only if a head is not one run of memory."""
    return x if x.stride(2) == 1 else x.contiguous()


def _splits(rows: Sequences, kv: Tensor, spec: AttentionSpec) -> int:
    """Into how many parts to cut the keys of decode rows, from what is the same at every replay of a graph."""
    _, _, kv_heads, block_size, _ = kv.shape
    sequences, width = rows.tables.shape
    keys = width * block_size if spec.window is None else min(width * block_size, spec.window)
    wanted = -(-PROGRAMS_PER_PROCESSOR * _processors(kv.device) // (sequences * kv_heads))
    return max(1, min(wanted, keys // SPLIT_KEYS, MAX_SPLITS))


def _processors(device: torch.device) -> int:
    """Multiprocessors of the device; Triton's interpreter has one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _flash_takes(query: Tensor, row: RowShape, spec: AttentionSpec) -> bool:
    """Whether PyTorch's flash attention computes this row."""
    sees_all = spec.window is None or spec.window >= row.context
    return sees_all and spec.softcap is None and _flash_takes_heads(query)


def _flash_takes_heads(query: Tensor) -> bool:
    """Whether PyTorch's flash attention has a kernel for heads like those of `query`."""
    return query.dtype in HALVES and query.shape[2] <= FLASH_DIMS


def _context(row: RowShape, key: Tensor, value: Tensor, kv: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """All keys and values that a prompt sees, each `[kv_heads, context, head_dim]`; `key`, `value` are its own."""
    if row.length == row.context and kv.dtype is not FLOAT8:
        return key.transpose(0, 1), value.transpose(0, 1)
    blocks = kv[table[: -(-row.context // kv.shape[3])]]
    keys, values = from_rows(blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : row.context], key.dtype)
    return keys, values


def _attend_flash(query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec) -> Tensor:
    """`[length, heads, head_dim]` queries over `[kv_heads, context, head_dim]` keys and values, of which each query
    sees all up to its own.

    An operator behind `F.scaled_dot_product_attention`, which on Hopper would choose cuDNN's attention instead, and
    that builds a plan for every new length. Here `is_causal` means that the last query sees the last key, as in
    FlashAttention since 2.1 (`torch.nn.attention.bias` relies on it too), and heads may share keys.
    """
    head_dim = query.shape[2]
    states = [x[None] for x in (query.transpose(0, 1), keys, values)]
    if head_dim % FLASH_DIMS_STEP:
        states = [F.pad(x, (0, -head_dim % FLASH_DIMS_STEP)) for x in states]
    flash_attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    attended: Tensor = flash_attention(*states, is_causal=True, scale=spec.scale)[0]
    return attended[0, :, :, :head_dim].transpose(0, 1)
