"""Unpack vLLM and prove that it runs: `python3 benchmarks/gpu_rivals/unpacking.py FOLDER PART... [--prove]`.

Standard library only, so that any Python 3.12 with PyTorch 2.11 runs it. The proof imports vLLM, finds its kernels, and
writes one token with a small model of random weights. Without a GPU it ends before the token: then libraries find a
driver without any function, which it compiles.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

MODULES = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.entrypoints.openai.api_server",
)
PROOF = f"""
import importlib, torch
for name in {MODULES}:
    importlib.import_module(name)
import vllm
torch.ops._C.rms_norm, torch.ops._C_cache_ops.reshape_and_cache_flash, torch.ops._vllm_fa3_C.fwd
print("vLLM", vllm.__version__, "with its kernels, PyTorch", torch.__version__)
"""
TOKEN = """
import sys, torch
from vllm import LLM, SamplingParams
llm = LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, max_model_len=256, enforce_eager=True,
          gpu_memory_utilization=0.1)
[answer] = llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=1, detokenize=False))
print("one token:", *answer.outputs[0].token_ids, "on", torch.cuda.get_device_name())
"""
SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}


def main() -> int:
    """Unpacks the parts, and proves what is there if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where vLLM goes; put it into PYTHONPATH afterwards")
    parser.add_argument("parts", type=Path, nargs="*", help="the folders that were carried along")
    parser.add_argument("--prove", action="store_true", help="once all parts are there")
    options = parser.parse_args()
    for part in options.parts:
        began = time.monotonic()
        with tarfile.open(part / "rival.tar.xz") as archive:
            archive.extractall(options.folder, filter="data")
        print(f"{part}: unpacked in {time.monotonic() - began:.0f} s", flush=True)
    return prove(options.folder) if options.prove else 0


def prove(folder: Path) -> int:
    """The exit status of a vLLM in `folder` that writes a token, or without a GPU is imported."""
    with tempfile.TemporaryDirectory() as scratch:
        variables = {**os.environ, "PYTHONPATH": str(folder), "VLLM_NO_USAGE_STATS": "1"}
        # The driver is a library of the system: PyTorch's packages do not bring it.
        has_driver = subprocess.run([sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"],
                                    capture_output=True, check=False).returncode == 0  # fmt: skip
        if not has_driver:
            _compile_driver(folder, Path(scratch))
            variables["LD_LIBRARY_PATH"] = os.pathsep.join([scratch, os.environ.get("LD_LIBRARY_PATH", "")])
        status = subprocess.run([sys.executable, "-c", PROOF], env=variables, check=False).returncode
        if status != 0 or not has_driver:
            print("not proved" if status else "no GPU here: a token is not proved")
            return status
        model = Path(scratch, "model")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(SMALL))
        return subprocess.run([sys.executable, "-c", TOKEN, str(model)], env=variables, check=False).returncode


def _compile_driver(folder: Path, to: Path) -> None:
    """A `libcuda.so.1` that has each function which the libraries in `folder` look for, and which does nothing."""
    libraries = [str(path) for path in folder.glob("vllm/**/*.so")]
    symbols = subprocess.run(["nm", "-D", "-u", *libraries], capture_output=True, text=True, check=True).stdout
    named = {line.split()[-1] for line in symbols.splitlines() if " U cu" in line}
    functions = sorted(name for name in named if name[2].isupper())
    source = to / "driver.c"
    source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in functions))
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", to / "libcuda.so.1", source], check=True
    )


if __name__ == "__main__":
    sys.exit(main())
