"""Dense layers: which kind a device multiplies fastest, and keeps a row's bits where that is asked for."""

import torch

from app.gpu.linear.base import MakeLinear
from app.gpu.linear.dense import DenseLinear
from app.gpu.linear.onednn import PackedLinear, StoredLinear, onednn_multiplies
from app.gpu.linear.tiled import tiled_maker
from app.gpu.linear.triton import TritonLinear


def linear_maker(device: torch.device, dtype: torch.dtype, *, streamed: bool, batch_invariant: bool) -> MakeLinear:
    """The fastest layers for weights of `dtype` that stay on `device`, or are `streamed` to it. Their results have the
    same bits in either case.

    With `batch_invariant` they give a row the same bits in any batch; making one raises FieldOutOfRange where that
    cannot be.
    """
    if device.type == "cuda":
        return TritonLinear if batch_invariant else DenseLinear
    if dtype is torch.float32:
        from app.gpu.linear.panels import PanelLinear  # imports Numba, which only a CPU needs

        return PanelLinear
    fastest: MakeLinear = DenseLinear
    if onednn_multiplies(dtype):
        fastest = StoredLinear if streamed else PackedLinear
    return tiled_maker(fastest) if batch_invariant else fastest
