"""Accelerate: on CUDA weights are offloaded to host memory.

On a CPU that is where it computes: nothing would move, and nothing would be saved. There they are offloaded to disk, by
`device_map`, so that they are read from the model's own files: Accelerate's `disk_offload`, which writes files of its
own, takes a quarter longer for a pass.
"""

from typing import Any

import torch
from accelerate import cpu_offload
from transformers import AutoModelForCausalLM

from loadgen.rivals.offload.generating import DEVICE, answer_lines

TO = "host memory" if DEVICE.type == "cuda" else "disk"


def load(asked: dict[str, Any]) -> Any:
    """The model, with none of its weights on the device between its modules' turns."""
    dtype = getattr(torch, asked["dtype"])
    make: Any = AutoModelForCausalLM.from_pretrained
    if DEVICE.type == "cuda":
        return cpu_offload(make(asked["model"], dtype=dtype).eval(), execution_device=DEVICE)
    return make(asked["model"], dtype=dtype, device_map={"": "disk"}, offload_folder=asked["folder"]).eval()


if __name__ == "__main__":
    answer_lines(load, TO)
