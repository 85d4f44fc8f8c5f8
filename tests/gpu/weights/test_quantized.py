"""Quantized checkpoints say what a checkpoint of the same values says."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from app.doctor.examination import check_model
from app.doctor.probe import Finding, Status
from app.gpu.models import load_stack
from app.model_store.install import BrokenModel
from app.model_store.resolve import resolve
from app.settings import Settings
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
    """In blocks of 16; read by Transformers. Scales of more blocks, which padding would have, are not numbers."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    rows, inputs = weight.shape
    padded = nn.functional.pad(weight, (0, -inputs % GROUP, 0, -rows % GROUP))
    blocks = padded.unflatten(0, (-1, GROUP)).unflatten(2, (-1, GROUP))
    scale = blocks.abs().amax((1, 3)) / 448
    stored = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(padded.shape)
    [values] = [Fp8Dequantize(None)._dequantize_one(stored, scale, torch.float32)]
    more = nn.functional.pad(scale, (0, 1, 0, 1), value=torch.nan)
    return {"weight": stored[:rows, :inputs], "weight_scale_inv": more}, values[:rows, :inputs]


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


def read_awq(weight: Tensor) -> Stored:
    """The same as the library compressed-tensors reads it, which converts AutoAWQ's files."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.entrypoints.convert import AutoAWQConverter
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    stored, args = awq(weight)[0], QuantizationArgs(num_bits=4, strategy="group", group_size=GROUP, symmetric=False)
    found = AutoAWQConverter(group_size=GROUP).process({f"m.{end}": each for end, each in stored.items()})
    parts, scheme = {name[2:]: each for name, each in found.items()}, QuantizationScheme(targets=[], weights=args)
    read = BaseCompressor.get_value_from_registry("pack-quantized").decompress
    return stored, read(parts, scheme)["weight"].float()


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
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Stored]]] = {
    "fp8 in blocks": ({"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}, fp8),
    "int4": (COMPRESSED, library(4)),
    "int4 with zeros": (COMPRESSED, library(4, symmetric=False)),
    "int3": (COMPRESSED, library(3)),
    "int8 by row": (COMPRESSED, library(8, strategy="channel", group_size=None)),
    "float8 by row": (COMPRESSED, library(8, type="float", strategy="channel", group_size=None)),
    "NVFP4": (COMPRESSED, library(4, type="float", strategy="tensor_group", group_size=16)),
    "AWQ": (AWQ, awq),
    "AWQ, read by a library": (AWQ, read_awq),
    "GPTQ": (GPTQ, gptq),
    "GPTQ by activation": ({**GPTQ, "desc_act": True}, lambda weight: gptq(weight, by_activation=True)),
    "GPTQ v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, lambda weight: gptq(weight, less=0)),
}
LLAMAS = list(FORMATS)
OF_LIBRARY = [name for name, (config, quantize) in FORMATS.items() if config is COMPRESSED or quantize is read_awq]


def mxfp4(weight: Tensor) -> Stored:
    """The experts of gpt-oss, `[experts, in, out]`; read by Transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(weight.numel())
    experts, inputs, outputs = weight.shape
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(121, 125, blocks.shape[:3], dtype=torch.uint8, generator=generator)
    return {"blocks": blocks, "scales": scales}, convert_moe_packed_tensors(blocks, scales).float()


FORMATS |= {"MXFP4": ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, mxfp4)}


def quantized_folder(name: str, folder: Path, case: str = "llama") -> tuple[Path, Path]:
    """A folder in this format, and one of the values in it."""
    config, quantize = FORMATS[name]
    model_config = tiny_config(case)
    if name == "MXFP4":
        model_config.hidden_size, model_config.intermediate_size = 64, 96
    dense = save_model(build_model(model_config), folder / "dense")
    state = dict[str, Tensor]()
    values = load_file(dense / "model.safetensors")
    for key, tensor in values.items():
        base, experts = key.removesuffix(".weight"), tensor.dim() == 3
        if ".layers." not in key or (tensor.dim() == 2) == (name == "MXFP4") or tensor.dim() < 2 or "gate." in key:
            state[key] = tensor
            continue
        stored, found = quantize(tensor)
        values[key] = found.contiguous()
        state |= {f"{base}{'_' if experts else '.'}{end}": each.contiguous() for end, each in stored.items()}
    save_file(values, dense / "model.safetensors", metadata={"format": "pt"})
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((dense / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    return folder, dense


def logits(folder: Path, cache: Path) -> tuple[Tensor, int]:
    """Of a prompt and three single tokens behind it; and the bytes of all weights."""
    model, cpu = resolve(str(folder), cache_dir=cache), torch.device("cpu")
    stack = load_stack(model, device=cpu, dtype=torch.float32, attention=ReferenceAttention())
    found = Drive(stack, [torch.arange(3, 43)]).run([{0: 37}, {0: 1}, {0: 1}, {0: 1}])[0].logits
    return found, stack.parameter_bytes


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(pytest.param(name, "llama", marks=pytest.mark.dev if name in OF_LIBRARY else ()) for name in LLAMAS),
        ("MXFP4", "gpt_oss, sinks"),
        ("GPTQ", "gemma2"),
        ("AWQ", "mixtral"),
        ("fp8 in blocks", "dots1"),
    ],
)
def test_it_says_what_its_values_say(name: str, case: str, tmp_path: Path) -> None:
    """On layers of Djinn's in less memory than in bfloat16, and on Transformers' modules."""
    folder, dense = quantized_folder(name, tmp_path / "quantized", case)
    (found, nbytes), (expected, whole) = (logits(each, tmp_path) for each in (folder, dense))
    assert torch.equal(found, expected)
    if case == "llama" and "by activation" not in name:
        assert nbytes < 0.55 * whole


@pytest.mark.parametrize(
    ("name", "kind"),
    [("fp8 in blocks", None), ("fp8 in blocks", torch.float8_e8m0fnu), ("AWQ", None), ("GPTQ by activation", None)],
)
def test_scales_that_are_not_finite_are_refused(name: str, kind: torch.dtype | None, tmp_path: Path) -> None:
    folder, _ = quantized_folder(name, tmp_path / "quantized")
    tensors = load_file(folder / "model.safetensors")
    key = next(key for key in sorted(tensors) if "scale" in key)
    tensors[key][0, 0] = torch.nan
    tensors[key] = tensors[key].to(kind or tensors[key].dtype)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(BrokenModel, match=f"'{re.escape(key)}' in .* scales that are not finite"):
        logits(folder, tmp_path)


def test_the_doctor_says_what_a_model_would_take_or_why_it_cannot_be_read(tmp_path: Path) -> None:
    def ask(name: str, changed: dict[str, Any], words: int = 9, without: str = "") -> Finding:
        folder, _ = quantized_folder("MXFP4" if "sinks" in name else "AWQ", tmp_path / name, name.partition("-")[0])
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changed))
        vocabulary = Tokenizer(WordLevel({str(number): number for number in range(words)}, "0"))
        PreTrainedTokenizerFast(tokenizer_object=vocabulary).save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        save_file({key: each for key, each in tensors.items() if key != without}, folder / "model.safetensors")
        return check_model(Settings(model=str(folder), device="cpu", dtype="float32", cache_dir=tmp_path))

    fits = ask("llama", {})
    assert fits.status is Status.OK
    assert re.search(r"llama on Djinn's own layers, in float32; weights \(awq, kept so\) take .* MiB of", fits.summary)
    assert "weights (awq, dequantized at the start)" in ask("vaultgemma", {}).summary
    name = "model.layers.1.mlp.up_proj.qweight"
    for found, said in (
        (ask("llama-odd", {"quantization_config": {"quant_method": "odd"}}), "method is 'odd'; Djinn reads fp8, comp"),
        (ask("llama-old", {"quantization_config": AWQ | {"version": "odd"}}), "version is 'odd'; Djinn reads gemm"),
        (ask("llama-name", {"quantization_config": "awq"}), "quantization_config must be an object; got 'awq'"),
        (ask("llama-text", {"hidden_size": "wide"}), "cannot read config.json in .* field 'hidden_size'"),
        (ask("mixtral-8", {"num_local_experts": 8}), "num_local_experts is 8, and the weights have 4 experts"),
        (ask("gpt_oss, sinks-8", {"num_local_experts": 8}), "num_local_experts is 8, and the weights have 4 experts"),
        (ask("llama-large", {}, words=99), r"tokenizer in .* has 99 tokens, and vocab_size in config.json is 67"),
        (ask("llama-less", {}, without=name), r"has no tensor 'model\.layers\.1\.mlp\.up_proj\."),
    ):
        assert found.status is Status.ERROR
        assert re.search(said, found.summary)
