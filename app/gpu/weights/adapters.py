"""LoRA adapters (Hu et al., arXiv:2106.09685) as PEFT writes them: a folder with `adapter_config.json` and
`adapter_model.safetensors`. All of it is checked before anything is made of it: a file may come from anybody.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from app.domain.errors import AdaptersFull, BadAdapter
from app.gpu.weights.source import LANGUAGE
from app.machine.files import size
from app.model_store.install import DAMAGED

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
PREFIX = "base_model.model."
"""Of each tensor's name in the file, before that of the module."""
DOWN, UP = ".lora_A.weight", ".lora_B.weight"

_REFUSED = {
    "use_dora": "Djinn computes no DoRA",
    "modules_to_save": "an adapter may not replace whole modules of the base",
    "lora_bias": "an adapter may have no bias",
    "target_parameters": "only matrices of dense layers can be adapted",
    "trainable_token_indices": "an adapter may not change embeddings",
    "alora_invocation_tokens": "an adapter is on for all tokens of a session",
    "layer_replication": "an adapter may not change the number of layers",
}
"""Fields that must be empty, and why."""
_READ = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
}
_OF_TRAINING = {
    *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version"),
    *("lora_dropout", "fan_in_fan_out", "megatron_config", "megatron_core", "loftq_config", "eva_config"),
    *("corda_config", "lora_ga_config", "velora_config", "runtime_config", "qalora_group_size", "ensure_weight_tying"),
}
"""Fields that change nothing of what a trained adapter computes."""
_QUANTIFIER = re.compile(r"(?<!\()[*+?{]")
_OF_GROUP = re.compile(r"\)[*+?{]")
_MOST_QUANTIFIERS = 3
"""In one expression, none of them of a group: the time that it takes on a name grows with this power of its length."""
_INITS = {True, False, "gaussian", "eva", "orthogonal"}
"""Ways to begin a training that leave the base's own weights as they are."""


@dataclass(frozen=True, slots=True)
class Factors:
    """What is added to one module's `x W^T`: `scale * (x A^T) B^T`. `down` is A, `[rank, in]`, `up` is B,
    `[out, rank]`.
    """

    down: Tensor
    up: Tensor
    scale: float

    @property
    def rank(self) -> int:
        """Of both."""
        return self.down.shape[0]


def read_adapter(folder: Path, adaptable: Mapping[str, tuple[int, int]], room: int) -> tuple[str, dict[str, Factors]]:
    """The digest of the adapter in `folder`, SHA-256 over both files in hexadecimal digits, and its factors by module.
    It is for a base whose `adaptable` modules have matrices of these shapes, `[out, in]`.

    Raises `BadAdapter`, which names the file and the field or the tensor, and `AdaptersFull` for a file of more than
    `room` bytes, of which nothing is read.
    """
    config_bytes = _read(folder / CONFIG, MAX_CONFIG_BYTES)
    rule = _Rule.of(folder / CONFIG, config_bytes)
    path = folder / WEIGHTS
    data = _read(path, room, full=True)
    try:
        tensors = load_tensors(data)
    except (SafetensorError, *DAMAGED) as error:
        raise BadAdapter(f"{path} is no safetensors file: {error}") from error
    digest = hashlib.sha256(len(config_bytes).to_bytes(8, "little") + config_bytes)
    digest.update(data)
    own = _in_file(tensors, adaptable)
    adaptable = {name: adaptable[module] for name, module in own.items()}
    modules = dict[str, Factors]()
    for name in sorted(tensors):
        module = name.removeprefix(PREFIX).removesuffix(DOWN).removesuffix(UP)
        if name not in (f"{PREFIX}{module}{DOWN}", f"{PREFIX}{module}{UP}"):
            raise BadAdapter(f"{path}: {name[:200]!r} is no factor of a module; only lora_A and lora_B are read")
        if module not in adaptable:
            raise BadAdapter(f"{path}: {name[:200]!r} is of a module that the base model has not, or not as a matrix")
        if module not in modules:
            modules[module] = _factors(path, tensors, module, adaptable[module], rule)
    for module in adaptable:
        if module not in modules and rule.targets(module):
            raise BadAdapter(f"{path} has no {PREFIX}{module}{DOWN}, which target_modules of {CONFIG} names")
    if not modules:
        raise BadAdapter(f"{path} has no tensors")
    return digest.hexdigest(), {own[name]: factors for name, factors in modules.items()}


def _in_file(tensors: Iterable[str], adaptable: Iterable[str]) -> dict[str, str]:
    """The modules by their names in the file: one that was trained beside models of other kinds, as of images, says of
    each that it is the language model's.
    """
    found = next((each for name in tensors if (each := LANGUAGE.search(name.removeprefix(PREFIX)))), None)
    at, said = (0, "") if found is None else (found.start(), found[0])
    return {f"{module[:at]}{said}{module[at:]}": module for module in adaptable}


def _read(path: Path, most: int, *, full: bool = False) -> bytes:
    """The file's bytes. `full`: one of more than `most` is too large for what is left, not in itself."""
    try:
        if not path.is_file():
            raise BadAdapter(f"there is no file {path}")
        with path.open("rb") as file:
            data = file.read(most + 1)
            if len(data) > most:
                found = path.stat().st_size
                if full:
                    raise AdaptersFull(f"{path} has {size(found)}; adapters may take {size(most)} more: unload others")
                raise BadAdapter(f"{path} has {size(found)}; at most {size(most)} are read")
            return data
    except OSError as error:
        raise BadAdapter(f"cannot read {path}: {error.strerror}") from error


def _factors(path: Path, tensors: Mapping[str, Tensor], module: str, shape: tuple[int, int], rule: _Rule) -> Factors:
    outputs, inputs = shape
    rank, found = rule.rank(module), list[Tensor]()
    for name, wanted in ((f"{PREFIX}{module}{DOWN}", (rank, inputs)), (f"{PREFIX}{module}{UP}", (outputs, rank))):
        tensor = tensors.get(name)
        if tensor is None:
            raise BadAdapter(f"{path} has no {name}")
        if tuple(tensor.shape) != wanted:
            raise BadAdapter(
                f"{path}: {name} is {list(tensor.shape)}, must be {list(wanted)} for the base model and rank {rank} of "
                f"{CONFIG}"
            )
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise BadAdapter(f"{path}: {name} is {tensor.dtype}, must be float32, bfloat16 or float16")
        if not bool(torch.isfinite(tensor).all()):
            raise BadAdapter(f"{path}: {name} has values that are not finite")
        found.append(tensor)
    down, up = found
    return Factors(down, up, rule.scale(module))


@dataclass(frozen=True, slots=True)
class _Rule:
    """What the config says of each module, as PEFT reads it."""

    path: Path
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, path: Path, data: bytes) -> _Rule:
        """Raises `BadAdapter` for a field that asks for something else, or has a value that it cannot have."""
        try:
            fields = json.loads(data)
        except DAMAGED as error:
            raise BadAdapter(f"{path} is no JSON: {error}") from error
        if not isinstance(fields, dict):
            raise BadAdapter(f"{path} is no JSON object")
        rule = cls(path, fields)
        if fields.get("peft_type") != "LORA":
            raise rule.wrong("peft_type", "LORA")
        for name in sorted(fields.keys() - _READ - _OF_TRAINING):
            if fields[name]:
                why = _REFUSED.get(name, "Djinn does not know what it changes")
                raise BadAdapter(f"{path}: {name} must be empty: {why}; got {str(fields[name])[:80]}")
        if fields.get("bias", "none") != "none":
            raise rule.wrong("bias", "none")
        init = fields.get("init_lora_weights", True)
        if not isinstance(init, bool | str) or init not in _INITS:
            raise BadAdapter(
                f"{path}: init_lora_weights must be one of true, false, gaussian, orthogonal and eva: others change "
                f"the base's own weights; got {str(init)[:80]}"
            )
        rule.number("r", whole=True)
        rule.number("lora_alpha")
        for name, whole in (("rank_pattern", True), ("alpha_pattern", False)):
            if not isinstance(fields.get(name) or {}, dict):
                raise rule.wrong(name, "an object of numbers by module")
            for pattern in fields.get(name) or {}:
                rule.number(name, pattern, whole=whole)
        for name in ("target_modules", "exclude_modules", "layers_pattern"):
            found = fields.get(name) or []
            if not isinstance(found, str) and not (isinstance(found, list) and all(isinstance(x, str) for x in found)):
                raise rule.wrong(name, "a list of names, or an expression")
        layers = fields.get("layers_to_transform")
        if layers is not None and not all(type(x) is int for x in (layers if isinstance(layers, list) else [layers])):
            raise rule.wrong("layers_to_transform", "a list of layers")
        rule.targets("model.layers.0.self_attn.q_proj")
        rule.rank("model.layers.0.self_attn.q_proj")
        return rule

    def wrong(self, name: str, wanted: str) -> BadAdapter:
        """The error for a field that must be something else."""
        return BadAdapter(f"{self.path}: {name} must be {wanted}; got {str(self.fields.get(name))[:80]}")

    def number(self, name: str, pattern: str | None = None, *, whole: bool = False) -> float:
        """A number above 0 in the field, or under the `pattern` in it."""
        found = self.fields.get(name, 8) if pattern is None else self.fields[name][pattern]
        kinds = (int,) if whole else (int, float)
        if type(found) not in kinds or not 0 < found <= 1 << 16:
            where = name if pattern is None else f"{name}.{pattern[:80]}"
            what = "a whole number" if whole else "a number"
            raise BadAdapter(f"{self.path}: {where} must be {what} above 0, at most {1 << 16}; got {str(found)[:80]}")
        return float(found)

    def rank(self, module: str) -> int:
        """The rank of a module's factors."""
        return int(self.number(*self._where("r", "rank_pattern", module), whole=True))

    def scale(self, module: str) -> float:
        """alpha / rank, or with rsLoRA alpha / sqrt(rank) (Kalajdzievski, arXiv:2312.03732)."""
        rank, alpha = self.rank(module), self.number(*self._where("lora_alpha", "alpha_pattern", module))
        return alpha / math.sqrt(rank) if self.fields.get("use_rslora") else alpha / rank

    def targets(self, module: str) -> bool:
        """Whether the config names the module, so that the file must have its factors."""
        if self._is_named("exclude_modules", module) or not self._is_named("target_modules", module):
            return False
        layers = self.fields.get("layers_to_transform")
        if layers is None or layers == [] or isinstance(self.fields["target_modules"], str):
            return True
        names = self.fields.get("layers_pattern") or []
        kept = "|".join(map(re.escape, [names] if isinstance(names, str) else names)) or r"[^.]*"
        match = re.match(rf"(?:^|.*?\.)(?:{kept})\.(\d+)\.", module)
        return match is not None and int(match[1]) in (layers if isinstance(layers, list) else [layers])

    def _is_named(self, name: str, module: str) -> bool:
        names = self.fields.get(name) or []
        if isinstance(names, list):
            return any(f".{module}".endswith(f".{each}") for each in names)
        is_all = name == "target_modules" and names == "all-linear"
        return is_all or self._matches(names, module, name)

    def _where(self, name: str, patterns: str, module: str) -> tuple[str, str | None]:
        for pattern in self.fields.get(patterns) or {}:
            parts = module.split(".")
            ends = [module] if pattern.startswith("^") else [".".join(parts[at:]) for at in range(len(parts))]
            if any(self._matches(pattern, end, patterns) for end in ends):
                return patterns, pattern
        return name, None

    def _matches(self, pattern: str, module: str, name: str) -> bool:
        """Whether the expression matches all of it. One that could take for ever on some name is refused."""
        if _OF_GROUP.search(pattern) or len(_QUANTIFIER.findall(pattern)) > _MOST_QUANTIFIERS:
            raise BadAdapter(f"{self.path}: {name}: the expression {pattern[:80]!r} is too complex")
        try:
            return re.fullmatch(pattern, module) is not None
        except (re.error, RecursionError) as error:
            raise BadAdapter(f"{self.path}: {name}: {pattern[:80]!r} is no regular expression: {error}") from error
