"""As what a source hands out its tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor

from app.domain.values import WeightsDtype
from app.gpu.kernels.linear.eight_bits import FLOAT8, INT8, quantize, require_inputs, row_bytes
from app.gpu.kernels.linear.matrix import BlockMatrix, Matrix, dense_of
from app.model_store.sizes import StoredSize

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_KINDS = {WeightsDtype.INT8: INT8, WeightsDtype.FLOAT8: FLOAT8}
"""Of blocks."""


@dataclass(frozen=True, slots=True)
class Form:
    """Tensors are for computation in `dtype` on `device`; `matrices` is for those that need not be in `dtype`."""

    device: torch.device
    dtype: torch.dtype
    matrices: WeightsDtype = WeightsDtype.CHECKPOINT

    @property
    def keeps_matrices(self) -> bool:
        """Whether matrices are kept as `matrices` says. A GPU, and a CPU that computes in half precision, multiply
        matrices in `dtype`, or in blocks of 8 bits.
        """
        return self.matrices in _KINDS or (self.device.type == "cpu" and self.dtype is torch.float32)

    def dense(self, tensor: Tensor) -> Tensor:
        """A tensor in `dtype` on `device`."""
        return tensor.to(self.device, self.dtype)

    def nbytes(self, stored: StoredSize) -> int:
        """Bytes of a stored tensor as it is handed out, if one with two axes is a matrix."""
        if len(stored.shape) < 2 or not self.keeps_matrices:
            return stored.elements * self.dtype.itemsize
        match self.matrices:
            case WeightsDtype.CHECKPOINT:
                return stored.nbytes
            case WeightsDtype.FLOAT32:
                return stored.elements * 4
            case WeightsDtype.BFLOAT16:
                return stored.elements * 2
            case WeightsDtype.INT8 | WeightsDtype.FLOAT8:
                inputs = stored.shape[-1]
                return stored.elements // inputs * row_bytes(_KINDS[self.matrices], inputs)

    def outline(self, name: str, stored: Matrix) -> Matrix:
        """What `matrix` would make of the matrix `stored`, which is on `meta`, as the result is."""
        rows, inputs = stored.shape
        if not self.keeps_matrices:
            return torch.empty((rows, inputs), dtype=self.dtype, device="meta")
        if isinstance(stored, BlockMatrix) and self.matrices is not WeightsDtype.CHECKPOINT:
            return self.matrix(name, torch.empty((rows, inputs), dtype=torch.float32, device="meta"))
        return self.matrix(name, stored)

    def matrix(self, name: str, stored: Matrix) -> Matrix:
        """The matrix `name` as `matrices` says. Raises FieldOutOfRange for 8 bits if its rows have no whole blocks."""
        match self.matrices:
            case WeightsDtype.CHECKPOINT:
                known = isinstance(stored, BlockMatrix) or stored.dtype in _FLOATS
                return stored if known else dense_of(stored).float()
            case WeightsDtype.FLOAT32:
                return dense_of(stored).float()
            case WeightsDtype.BFLOAT16:
                return dense_of(stored).bfloat16()
            case WeightsDtype.INT8 | WeightsDtype.FLOAT8:
                return _quantize(_KINDS[self.matrices], name, stored)


def _quantize(kind: str, name: str, stored: Matrix) -> BlockMatrix:
    if isinstance(stored, BlockMatrix) and stored.kind == kind:
        return stored
    rows, inputs = stored.shape
    require_inputs(kind, inputs, name)
    return BlockMatrix(kind, quantize(kind, dense_of(stored)), (rows, inputs))


def nbytes_of(matrix: Matrix) -> int:
    """Bytes of the matrix as it is."""
    return matrix.rows.nbytes if isinstance(matrix, BlockMatrix) else matrix.nbytes
