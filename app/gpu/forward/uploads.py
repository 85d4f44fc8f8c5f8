"""What clients have uploaded, on the device: the numbers of dictionaries, lenses and probes, and products with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from app.domain.breakpoints import Feature, Need, OfTopK
from app.domain.errors import NotFound, UploadMissing, UploadsFull
from app.gpu.device.hardware import is_out_of_memory
from app.gpu.state.checkpoints import GetUpload, InParts

AT_ONCE = 1 << 24
"""Activations that are computed together, of a dictionary with many features: 64 MiB."""


class LoadedUploads:
    """By the digest of its file what each has, in float32 on the device. The engine thread alone uses it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[str, Mapping[str, Tensor]] = {}

    def load(self, path: Path, digest: str) -> None:
        """Take the file at `path`, which the server has written and checked. Raises `NotFound`, `UploadsFull`."""
        if digest in self._tensors:
            return
        try:
            self._tensors[digest] = load_file(path, device=str(self._device))
        except (OSError, SafetensorError) as error:
            raise NotFound("the file of the upload is missing or damaged: upload it again") from error
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise UploadsFull("the device has no memory left for the upload") from error

    def drop(self, digest: str) -> None:
        """Forget it. What is under way with it goes on."""
        self._tensors.pop(digest, None)

    def require(self, needs: Iterable[Need]) -> None:
        """Raise `UploadMissing` unless all of them are loaded."""
        for digest, width, features in needs:
            encoder = self._tensors.get(digest, {}).get("encoder")
            if encoder is not None and encoder.shape[1] == width and len(encoder) >= features:
                continue
            raise UploadMissing(
                "a dictionary that the session's breakpoints or history need is not loaded: upload it again, or remove "
                "the breakpoints"
            )

    def get(self, digest: str) -> Mapping[str, Tensor]:
        """Its tensors by name. Raises `NotFound` if it is not loaded."""
        found = self._tensors.get(digest)
        if found is None:
            raise NotFound("the upload is not loaded any more")
        return found


def activations(hidden: Tensor, tensors: Mapping[str, Tensor], k: int | None) -> Tensor:
    """The activation of each feature of a `Dictionary`, float32 `[positions, features]`, for `hidden` `[positions,
    width]`.
    """
    z = torch.nn.functional.linear(hidden.float(), tensors["encoder"])
    found = activation_of(z, tensors["scale"], tensors["bias"], tensors["gate"], tensors["threshold"])
    if k is not None:
        best = found.topk(k)
        found = torch.zeros_like(found).scatter_(-1, best.indices, best.values)
    return found


def activation_of(
    z: Tensor, scale: Tensor | float, bias: Tensor | float, gate: Tensor | float, threshold: Tensor | float
) -> Tensor:
    """`relu(scale * z + bias)` where `z + gate > threshold`, else 0: standard, JumpReLU (Rajamanoharan et al.,
    arXiv:2407.14435) and gated (arXiv:2404.16014) autoencoders alike.
    """
    return torch.relu(scale * z + bias) * (z + gate > threshold)


def best_features(hidden: Tensor, tensors: Mapping[str, Tensor], k: int | None, top_k: int) -> Tensor:
    """For each of `hidden` `[positions, width]` the activations of the `top_k` most active features, and then their
    numbers, which float32 has exactly: `[positions, 2 * top_k]`.
    """
    found = [activations(part, tensors, k).topk(top_k) for part in _parts(hidden, tensors)]
    return torch.cat([torch.cat([best.values, best.indices.float()], 1) for best in found])


def activation(hidden: Tensor, encoder: Tensor, feature: Feature, get: GetUpload) -> Tensor:
    """That of one feature, float32 `[positions, 1]`, for `hidden` float32 `[positions, width]`."""
    # Unlike a product's, the bits of a sum on a CPU are the same for any number of rows.
    z = (hidden * encoder).sum(-1, keepdim=True)
    found = activation_of(z, feature.scale, feature.bias, feature.gate, feature.threshold)
    return found if feature.of_topk is None else found * is_active(hidden, feature.of_topk, get)


def is_active(hidden: Tensor, feature: OfTopK, get: GetUpload) -> Tensor:
    """Whether the feature is among the `k` largest that are above 0, `[positions, 1]`, for `[positions, width]`."""
    tensors = get(feature.digest)
    there = hidden.to(tensors["encoder"].device)
    found = [activations(part, tensors, feature.k)[:, feature.index, None] > 0 for part in _parts(there, tensors)]
    return torch.cat(found).to(hidden.device)


def _parts(hidden: Tensor, tensors: Mapping[str, Tensor]) -> Sequence[Tensor]:
    parts: Sequence[Tensor] = hidden.split(max(1, AT_ONCE // len(tensors["encoder"])))
    return parts


def translated(hidden: Tensor, layers: Sequence[int], tensors: Mapping[str, Tensor], *, adds: bool) -> InParts[Tensor]:
    """What a lens makes of residual streams `[rows, hidden_size]` after `layers`, one for each row: neighbours of one
    layer are multiplied at once. A layer without a matrix is read as it is.
    """
    parts, first = [], 0
    for layer, same in groupby(layers):
        end = first + len(list(same))
        rows, weight = hidden[first:end].float(), tensors.get(f"{layer}.weight")
        if weight is not None:
            made = torch.nn.functional.linear(rows, weight, tensors.get(f"{layer}.bias"))
            rows = rows + made if adds else made
        parts.append(rows.to(hidden.dtype))
        first = end
        yield None
    return torch.cat(parts)
