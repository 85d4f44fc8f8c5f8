"""Loads a decoder as Transformers' own modules, for a model type that has no stack of its own."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.initialization import no_init_weights

from app.gpu.kernels.attention.base import Attention
from app.gpu.models.rotary import require_fixed_rope
from app.gpu.models.transformers import TransformersStack
from app.gpu.weights.source import RandomWeights, TensorFormat
from app.model_store.errors import BrokenModel
from app.model_store.resolve import ResolvedModel

# Transformers annotates these methods only in part.
_AUTO: Any = AutoModelForCausalLM
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def load_transformers_stack(
    model: ResolvedModel, device: torch.device, dtype: torch.dtype, attention: Attention, max_model_len: int
) -> TransformersStack:
    """Raises ValueError, with the reason, for an architecture that cannot be run layer by layer."""
    text = model.config.get_text_config()
    require_fixed_rope(text)
    others = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        raise ValueError(f"it has layers of type {', '.join(sorted(others))}")
    # Transformers keeps the choice of attention in the config.
    config = deepcopy(model.config)
    if model.folder is None:
        modules = _random_modules(config, model.seed, device, dtype)
    else:
        modules = _stored_modules(config, model.folder, dtype).to(device)
    return TransformersStack(modules.eval().requires_grad_(False), attention, max_model_len)


def _random_modules(config: PretrainedConfig, seed: int, device: torch.device, dtype: torch.dtype) -> Any:
    with device, no_init_weights():
        modules = _AUTO.from_config(config, dtype=dtype, attn_implementation="eager")
    source = RandomWeights(seed, config, TensorFormat(device, dtype))
    for name, parameter in modules.named_parameters():
        parameter.data = source.take(name, tuple(parameter.shape))
    return modules


def _stored_modules(config: PretrainedConfig, folder: Path, dtype: torch.dtype) -> Any:
    """Transformers' own loader: it knows the checkpoints whose names differ from the modules'."""
    try:
        modules, report = _AUTO.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, SafetensorError) as error:
        raise BrokenModel(f"cannot read the weights in {folder}: {error}", param="model") from error
    wrong = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if wrong:
        raise BrokenModel(f"the weights in {folder} do not fit the model: {wrong}", param="model")
    return modules
