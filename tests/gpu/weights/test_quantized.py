"""Quantized checkpoints say what a checkpoint of the same values says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from app.gpu.models import load_stack
from app.gpu.models.base import LayerStack
from app.model_store.install import BrokenModel
from app.model_store.resolve import ResolvedModel, resolve
from tests.gpu.kernels.attention.reference import ReferenceAttention
from tests.gpu.models.driving import Drive
from tests.gpu.models.oracle import build_model, save_model, tiny_config

GROUP = 16
Stored = tuple[dict[str, Tensor], Tensor]
"""A matrix's tensors by the ends of their names, and what they stand for."""


def library(bits: int, **changed: Any) -> Callable[[Tensor], Stored]:
    """Written and read again by the library compressed-tensors."""

    def quantized(weight: Tensor) -> Stored:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        chosen = {"num_bits": bits, "strategy": "group", "group_size": GROUP, **changed}
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**chosen))
        rows, inputs = weight.shape
        parts = weight.view(rows, -1, chosen.get("group_size") or inputs)
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        state: dict[str, Tensor] = {"weight": weight}
        if chosen.get("type") == "float":
            most = 448.0 if bits == 8 else 6.0
            state["weight_scale"] = torch.maximum(-low, high) / most
            if bits == 4:
                state["weight_global_scale"] = torch.tensor([448.0 / float(state["weight_scale"].max())])
                state["weight_scale"] *= state["weight_global_scale"]
        elif chosen.get("symmetric", True):
            state["weight_scale"] = torch.maximum(-low, high) / (2 ** (bits - 1) - 1)
        else:
            state["weight_scale"] = (high - low) / (2**bits - 1)
            state["weight_zero_point"] = (-(2 ** (bits - 1)) - low / state["weight_scale"]).round().to(torch.int8)
        if bits != 4 or chosen.get("type") != "float":
            state["weight_scale"] = state["weight_scale"].bfloat16()
        names = {"int": "pack-quantized" if bits < 8 else "int-quantized", "float": "float-quantized"}
        name = "nvfp4-pack-quantized" if "weight_global_scale" in state else names[chosen.get("type", "int")]
        compressor = BaseCompressor.get_value_from_registry(name)
        stored = compressor.compress(state, scheme)
        return stored, compressor.decompress(dict(stored), scheme)["weight"].float()

    return quantized


def fp8(weight: Tensor) -> Stored:
    """In blocks of 16; read by Transformers."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    rows, inputs = weight.shape
    padded = nn.functional.pad(weight, (0, -inputs % GROUP, 0, -rows % GROUP))
    blocks = padded.unflatten(0, (-1, GROUP)).unflatten(2, (-1, GROUP))
    scale = blocks.abs().amax((1, 3)) / 448
    stored = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(padded.shape)
    [values] = [Fp8Dequantize(None)._dequantize_one(stored, scale, torch.float32)]
    return {"weight": stored[:rows, :inputs], "weight_scale_inv": scale}, values[:rows, :inputs]


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Integers from 0 to 15, their zeros and scales by group, and the values, all for `[out, in]`."""
    parts = weight.view(weight.shape[0], -1, GROUP)
    scale = ((parts.amax(2) - parts.amin(2)) / 15).half()
    zeros = (-parts.amin(2) / scale).round().clamp(0, 15)
    stored = (parts / scale[..., None] + zeros[..., None]).round().clamp(0, 15)
    values = ((stored - zeros[..., None]) * scale[..., None].float()).half().float()
    return stored.view_as(weight).int(), zeros.int(), scale, values.view_as(weight)


def _pack(values: Tensor, order: list[int]) -> Tensor:
    """Eight neighbours of a row in 32 bits: the one of `order[i]` in the i-th four."""
    words = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
    for place, column in enumerate(order):
        words |= values[:, column::8].long() << 4 * place
    return words.int() if not (words >> 31).any() else (words - (words >> 31 << 32)).int()


def awq(weight: Tensor) -> Stored:
    stored, zeros, scale, values = _rounded(weight)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {"qweight": _pack(stored.T, order), "qzeros": _pack(zeros.T, order), "scales": scale.T.contiguous()}, values


def gptq(weight: Tensor, *, by_activation: bool = False, less: int = 1) -> Stored:
    """The groups' inputs may lie anywhere, as with `desc_act`."""
    inputs = weight.shape[1]
    place = (
        torch.randperm(inputs, generator=torch.Generator().manual_seed(0)) if by_activation else torch.arange(inputs)
    )
    stored, zeros, scale, values = _rounded(weight[:, place])
    back = place.argsort()
    order = list(range(8))
    return {
        "qweight": _pack(stored[:, back], order).T.contiguous(),
        "qzeros": _pack((zeros - less & 15).T, order),
        "scales": scale.T.contiguous(),
        "g_idx": (torch.arange(inputs) // GROUP)[back].int(),
    }, values[:, back]


COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Stored]]] = {
    "fp8 in blocks": ({"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}, fp8),
    "int4": (COMPRESSED, library(4)),
    "int4 with zeros": (COMPRESSED, library(4, symmetric=False)),
    "int3": (COMPRESSED, library(3)),
    "int8 by row": (COMPRESSED, library(8, strategy="channel", group_size=None)),
    "float8 by row": (COMPRESSED, library(8, type="float", strategy="channel", group_size=None)),
    "NVFP4": (COMPRESSED, library(4, type="float", strategy="tensor_group", group_size=16)),
    "AWQ": ({"quant_method": "awq", "bits": 4, "group_size": GROUP}, awq),
    "GPTQ": (GPTQ, gptq),
    "GPTQ by activation": (GPTQ, lambda weight: gptq(weight, by_activation=True)),
    "GPTQ v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, lambda weight: gptq(weight, less=0)),
}
OF_LIBRARY = [name for name, (config, _) in FORMATS.items() if config is COMPRESSED]


def quantized_folder(name: str, folder: Path) -> tuple[Path, Any]:
    """A folder in this format, and Transformers' model of the values in it."""
    config, quantize = FORMATS[name]
    oracle = build_model(tiny_config("llama"))
    state = {key: value.contiguous() for key, value in oracle.state_dict().items()}
    for path, module in oracle.model.layers.named_modules():
        if isinstance(module, nn.Linear):
            stored, values = quantize(module.weight.data)
            module.weight.data.copy_(values)
            del state[f"model.layers.{path}.weight"]
            state |= {f"model.layers.{path}.{end}": each.contiguous() for end, each in stored.items()}
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    fields = {**oracle.config.to_dict(), "architectures": ["LlamaForCausalLM"], "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder, oracle


def load(model: ResolvedModel) -> LayerStack:
    return load_stack(model, device=torch.device("cpu"), dtype=torch.float32, attention=ReferenceAttention())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.dev if name in OF_LIBRARY else ()) for name in FORMATS]
)
def test_it_says_what_its_values_say(name: str, tmp_path: Path) -> None:
    folder, oracle = quantized_folder(name, tmp_path / "quantized")
    dense = save_model(oracle, tmp_path / "dense")
    tokens = torch.arange(3, 43)
    found, expected = (
        Drive(load(resolve(str(each), cache_dir=tmp_path)), [tokens]).run([{0: 40}])[0].logits
        for each in (folder, dense)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("field", "known"), [("quant_method", "fp8, compressed-tensors, awq"), ("version", "gemm")])
def test_what_cannot_be_read_is_refused_by_its_name(tmp_path: Path, field: str, known: str) -> None:
    folder, _ = quantized_folder("AWQ", tmp_path / "quantized")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"][field] = "odd"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BrokenModel, match=f"{field} is 'odd'; Djinn reads {known}"):
        load(resolve(str(folder), cache_dir=tmp_path))
