"""The one way to a model's weights: from its folder, its GGUF files or its seed to a `WeightSource`."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch

from app.gpu.kernels.linear.base import BlockMatrix, Matrix
from app.gpu.weights.quantized import QuantizedFolder
from app.gpu.weights.source import FLOATS, RandomWeights, SafetensorsFolder, TensorFormat, WeightSource, require_finite
from app.model_store.resolve import ResolvedModel
from app.model_store.tensors import GgufIndex, is_indexed


class GgufFile(WeightSource):
    """The file that the index in a model's folder names, read in place. Blocks arrive on the host."""

    def __init__(self, folder: Path, tensor_format: TensorFormat) -> None:
        self._index = GgufIndex.read(folder)
        super().__init__(tensor_format, self._index.files[0], self._index.tensors)

    def _stored(self, name: str, shape: tuple[int, ...]) -> Matrix:
        stored = self._check_off(name)
        tensor = self._index.tensors[stored]
        self._require_shape(name, tensor.shape, shape)
        if self._format.on_meta:
            rows = torch.empty(tensor.nbytes, dtype=torch.uint8, device="meta")
        else:
            rows = torch.from_numpy(self._index.rows(stored))
        if tensor.kind in FLOATS:
            return rows.view(FLOATS[tensor.kind]).view(shape)
        rows = rows.view(prod(shape[:-1]), -1)
        matrix = BlockMatrix(tensor.kind, rows, (len(rows), shape[-1]))
        require_finite(name, matrix.scales, self._origin, has="scales")
        return matrix


def weights_of(
    model: ResolvedModel, device: torch.device, dtype: torch.dtype, *, on_meta: bool = False, on_gpu: bool = False
) -> WeightSource:
    """The weights of `model`, of its text model if it has others too. They arrive on `device`: matrices as the model
    says, if they are multiplied so there, or `on_gpu`, all others as `dtype`. Or, `on_meta`, their shapes and types:
    nothing is read.
    """
    tensor_format = TensorFormat(device, dtype, model.weights_dtype, on_meta, on_gpu)
    if model.folder is None:
        return RandomWeights(model.seed, model.config, tensor_format)
    if is_indexed(model.folder):
        return GgufFile(model.folder, tensor_format)
    quantization = getattr(model.config, "quantization_config", None)
    of_text = model.config.get_text_config() is not model.config
    if quantization is None:
        return SafetensorsFolder(model.folder, tensor_format, of_text=of_text)
    return QuantizedFolder(model.folder, quantization, tensor_format, of_text=of_text)
