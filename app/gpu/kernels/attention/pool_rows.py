"""How the keys, or the values, of one head of one token lie in the pool of KV: a row of `columns` elements.

In float8 a row is `head_dim` numbers, then their scale as float32. Each row has a scale of its own, so nothing that is
stored later can change it: its bits are the same however a prompt was cut. It lies inside the block, so whatever
copies, keeps or sends blocks carries it.
"""

import torch
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.gpu.device.dtypes import dtype_name
from app.gpu.kernels.linear.float8 import round_to_float8, widen_float8
from app.gpu.state.kv_header import SCALE_BYTES, row_columns

FLOAT8 = torch.float8_e4m3fn


def require_rows(dtype: torch.dtype, head_dim: int) -> None:
    """Raise FieldOutOfRange if rows of such heads cannot be of `dtype`: scales lie on whole words."""
    if dtype is FLOAT8 and head_dim % SCALE_BYTES:
        raise FieldOutOfRange(
            f"kv_dtype: float8 needs heads of a multiple of {SCALE_BYTES} numbers; this model's have {head_dim}",
            param="kv_dtype",
        )


def columns_of(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of a row."""
    return row_columns(head_dim, dtype_name(dtype))


def to_rows(states: Tensor, dtype: torch.dtype) -> Tensor:
    """`[..., head_dim]` of any float type as rows of `dtype`, `[..., columns]`, to nearest even."""
    if dtype is not FLOAT8:
        return states.to(dtype)
    numbers, scales = round_to_float8(states)
    return torch.cat([numbers.view(torch.uint8), scales.view(torch.uint8)], dim=-1).view(FLOAT8)


def from_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """What rows `[..., columns]` stand for, `[..., head_dim]` of `dtype`."""
    if rows.dtype is not FLOAT8:
        return rows.to(dtype)
    scales = rows.view(torch.uint8)[..., -SCALE_BYTES:].view(torch.float32)
    return widen_float8(rows[..., :-SCALE_BYTES], scales, dtype)
