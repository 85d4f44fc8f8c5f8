"""LoRA adapters that PEFT makes of a tiny model, and the model with each merged in: the oracle."""

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM


def make_adapter(base: Path, folder: Path, seed: int = 1, loads: Any = AutoModelForCausalLM, **changed: Any) -> Any:
    """Have PEFT write an adapter with random factors for the model in `base`; returns the merged model."""
    model = loads.from_pretrained(base, dtype=torch.float32)
    fields = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks Transformers by a name that will go
        adapted = get_peft_model(model, LoraConfig(**{**fields, **changed}))
    adapted.save_pretrained(str(folder))
    return adapted.merge_and_unload().eval()
