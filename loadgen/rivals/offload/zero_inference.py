"""DeepSpeed's ZeRO-Inference (Aminabadi et al., 2022): ZeRO stage 3 with its parameters offloaded to host memory.

A layer's parameters are copied from there before they are used, and those of the next layers meanwhile. Offloading to
disk needs libaio, which DeepSpeed does not bring along.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from loadgen.rivals.offload.generating import DEVICE, answer_lines

KEPT_ALIVE: list[Any] = []
"""Transformers looks for the configuration while a model is loaded, and holds no reference to it."""


def load(asked: dict[str, Any]) -> Any:
    """The model, with at most so many parameters on the device as the budget has bytes for."""
    import deepspeed  # it begins to print at once, when answers must have a way of their own already

    dtype = getattr(torch, asked["dtype"])
    rendezvous = (Path(asked["folder"]) / "rendezvous").as_uri()
    deepspeed.init_distributed(
        dist_backend="nccl" if DEVICE.type == "cuda" else "gloo",
        auto_mpi_discovery=False,
        init_method=rendezvous,
        rank=0,
        world_size=1,
    )
    config = _config(asked["budget_bytes"] // dtype.itemsize, asked["dtype"])
    KEPT_ALIVE.append(HfDeepSpeedConfig(config))
    make: Any = AutoModelForCausalLM.from_pretrained
    engine, *_ = deepspeed.initialize(model=make(asked["model"], dtype=dtype).eval(), config=config)
    return engine.module.eval()


def _config(parameters: int, dtype: str) -> dict[str, Any]:
    """Half of the room is for parameters in use, half for those that come next."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == "bfloat16"},
        "fp16": {"enabled": dtype == "float16"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": DEVICE.type == "cuda"},
            "stage3_param_persistence_threshold": 0,
            "stage3_prefetch_bucket_size": parameters // 2,
            "stage3_max_live_parameters": parameters,
        },
    }


if __name__ == "__main__":
    answer_lines(load, "host memory")
