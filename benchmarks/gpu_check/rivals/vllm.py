"""vLLM as `make gpu-rivals` has packed it, on a model of the same shape with random weights of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from app.model_store.tokenizer import load_tokenizer
from benchmarks.engine.loading import find_model, transformers_config
from benchmarks.gpu_check.context import SkipStage, StageContext
from benchmarks.gpu_check.plan import DecodePlan, DensityPlan
from loadgen.peers.vllm import CUDA_BLOCK_TOKENS, TELL_CACHED
from loadgen.processes.launch import Launch, flatten

FOLDER = "DJINN_RIVALS"
"""The variable that says where `benchmarks/gpu_rivals/unpacking.py` has put vLLM."""
SERVED = "rival"
DECODE_RATES = Path(__file__).resolve().parents[2] / "gpu_rivals" / "decode_rates.py"


def environment() -> dict[str, str]:
    """What vLLM's processes need. Raises `SkipStage` where there is no vLLM."""
    folder = os.environ.get(FOLDER)
    if folder is None or not Path(folder, "vllm").is_dir():
        raise SkipStage(f"no vLLM: unpack what `make gpu-rivals` packs, and set {FOLDER} to its folder")
    return {"PYTHONPATH": folder, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def write_model(name: str, folder: Path) -> None:
    """A Transformers folder of `random:SHAPE` without weights, in the type of a GPU: vLLM draws its own."""
    model = find_model(name)
    config = transformers_config(model)
    config.architectures, config.dtype = ["LlamaForCausalLM"], "bfloat16"
    config.save_pretrained(folder)
    tokenizer = load_tokenizer(model)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, **tokenizer.special_tokens).save_pretrained(folder)


def rates_of_vllm(context: StageContext, plan: DecodePlan, model: Path) -> Iterator[tuple[int, list[float]]]:
    """Tokens a second of every batch, as far as there is time; each as soon as it is known."""
    numbers = (plan.prompt_tokens, plan.tokens, plan.rounds, *plan.batches)
    command = [sys.executable, str(DECODE_RATES), str(model), *map(str, numbers)]
    variables = {**os.environ, **environment()}
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("["):
                batch, rates = json.loads(line)
                yield batch, rates
            if context.left_s <= 0:
                process.kill()


def vllm_launch(plan: DensityPlan, model: Path, kv_tokens: int, offload_gib: int, port: int) -> Launch:
    """Its server with room for `kv_tokens` on the device, the rest of its KV in host memory; else its defaults."""
    flags = {
        "--model": str(model),
        "--served-model-name": SERVED,
        "--load-format": "dummy",
        "--host": "127.0.0.1",
        "--port": str(port),
        "--max-model-len": str(2 * plan.context),
        "--num-gpu-blocks-override": str(kv_tokens // CUDA_BLOCK_TOKENS),
        "--kv-offloading-size": str(offload_gib),
        "--gpu-memory-utilization": "0.5",
    }
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flatten(flags), TELL_CACHED]
    return Launch(server, environment())
