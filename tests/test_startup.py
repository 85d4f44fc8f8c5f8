"""A start imports no more than it needs."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.model_store.tiny_gguf import tiny_llama, tiny_tokenizer, write_gguf

SLOW = ("transformers", "torch._dynamo", "torch._inductor", "sympy", "accelerate")
"""Each takes a tenth of a second to import, or seconds."""
LONG = pytest.mark.long
LOAD = """
import sys
from pathlib import Path
from app.main import load_app
from app.settings import Settings

settings = Settings(model=sys.argv[1], cache_dir=sys.argv[2], state_dir="none", kv_device="8MiB", kv_host="0")
load_app(settings)
print(*sys.modules)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.long
def test_the_process_that_speaks_http_never_has_pytorch(roomy_model: Path) -> None:
    """A quarter of the memory, and seconds of each start, with a model that only Transformers can read too."""
    flags = ["--model", str(roomy_model), "--port", "0", "--state-dir", "none", "--kv-device", "8MiB", "--kv-host", "0"]
    command = [sys.executable, "-m", "app", "serve", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        answer = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 2}, timeout=60)
        mapped = Path(f"/proc/{server.pid}/maps").read_text()
        server.terminate()
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert "tokenizers" in mapped
    assert "libtorch" not in mapped


@pytest.mark.parametrize(("model", "starts"), [("random:tiny-llama", 1), pytest.param("m.gguf", 2, marks=LONG)])
def test_a_model_is_loaded_without_transformers_at_its_first_start_too(model: str, starts: int, tmp_path: Path) -> None:
    if model.endswith(".gguf"):
        write_gguf(tmp_path / model, tiny_llama((tokenizer := tiny_tokenizer()).get_vocab_size()), tokenizer)
    command = [sys.executable, "-c", LOAD, model, "cache"]
    for _ in range(starts):
        told = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert "app.main" in (modules := told.stdout.split())
        assert [name for name in SLOW if name in modules] == []


CONVERT = """
import sys
from pathlib import Path
from app.model_store.install import ModelStoreError
from app.model_store.gguf import cached_gguf

try:
    cached_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
except ModelStoreError as error:
    print(error)
assert "torch" not in sys.modules
"""


def test_a_process_without_pytorch_hears_why_a_file_cannot_be_converted(tmp_path: Path) -> None:
    (tmp_path / "noise.gguf").write_bytes(b"noise" * 100)
    command = [sys.executable, "-c", CONVERT, str(tmp_path / "noise.gguf"), str(tmp_path / "cache")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.startswith("the conversion of noise.gguf failed: ")
    assert not list((tmp_path / "cache" / "gguf").glob("noise*"))


RECORD = """
import sys
import torch
from app.gpu.forward.programs import Arena, Recording

with torch.inference_mode(), Recording().within(Arena()):
    torch.empty(3).view(3, 1)
print(*sys.modules)
"""


def test_the_first_recorded_step_does_not_import_a_compiler() -> None:
    found = subprocess.run([sys.executable, "-c", RECORD], capture_output=True, text=True, check=True).stdout
    assert [name for name in SLOW if name in found.split()] == []
