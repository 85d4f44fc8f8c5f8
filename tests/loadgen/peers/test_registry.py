"""Servers of peers: what each is started with, and how it is up for a block or until it is told to stop."""

import argparse
import os
import re
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import psutil
import pytest

from loadgen.cli import main
from loadgen.errors import LoadgenError
from loadgen.options.targets import add_server_options, read_settings
from loadgen.peers import serving
from loadgen.peers.base import Say, ServerSettings
from loadgen.peers.llamacpp import SLOTS, LlamaCppSource
from loadgen.peers.registry import PEERS, find_peer
from loadgen.peers.vllm import needed_requirements
from loadgen.processes.launch import Launch
from loadgen.processes.process import ServerFailedError
from tests.loadgen.peers.conftest import BeOn

REFUSES = "import sys; sys.exit('Model LlamaForCausalLM is not supported')"


def launched(peer: str, settings: ServerSettings) -> Launch:
    return find_peer(peer).launch(settings, 8123)


def flags(peer: str, settings: ServerSettings) -> dict[str, str]:
    """The options that the peer is started with; the last of its command's words are pairs."""
    command = launched(peer, settings).command
    first = next(index for index, word in enumerate(command) if word.startswith("--"))
    words = command[first:]
    return {word: following for word, following in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}


def read(arguments: list[str]) -> ServerSettings:
    """What a command line with these options gives servers."""
    parser = argparse.ArgumentParser()
    add_server_options(parser)
    return replace(read_settings(parser.parse_args(arguments)), cores=(0, 1))


# Djinn.


@pytest.mark.parametrize(("peer", "policy"), [("djinn", "signal"), ("djinn+lru", "lru"), ("djinn+none", "none")])
def test_djinn_with_its_policies_and_for_agents_with_tools(settings: ServerSettings, peer: str, policy: str) -> None:
    given = flags(peer, settings)
    assert (given["--kv-policy"], given["--kv-device"], given["--state-dir"]) == (policy, "1x20480", "none")
    assert "--bind-by-prefix" not in given
    assert "--bind-by-prefix" in flags("djinn+tools", settings)
    assert find_peer("djinn+tools").served_model == "model+tools"


# Data types.


@pytest.mark.long
def test_servers_made_of_pytorch_get_the_type_that_is_measured_to_be_the_fastest(
    on_gpu: BeOn, cache: Path, model: Path, tmp_path: Path
) -> None:
    """Of a checkpoint that a folder was made of too, and again where the note of it is damaged."""
    on_gpu(False)
    (model / "config.json").write_text('{"hidden_size": 64, "intermediate_size": 128}')
    (model / "checkpoint").symlink_to(tmp_path)
    settings = read(["--model", str(model)])
    for content in (None, "{}"):
        for note in (cache.parent / "calibration").glob("*") if content else ():
            note.write_text(content or "")
        calibration = launched("djinn", settings).calibration
        assert calibration is not None
        assert all(min(seconds) > 0 for seconds in calibration.seconds.values())
        for peer in ("vllm", "transformers"):
            assert flags(peer, settings)["--dtype"] == calibration.dtype
    assert calibration is not None
    ours = flags("djinn", settings)
    assert (ours["--dtype"], ours["--model"]) == ("auto", str(model / "checkpoint"))
    assert ours.get("--matmul-precision") == (None if calibration.dtype == "float32" else calibration.dtype)


def test_a_gpu_is_given_bfloat16_unmeasured(on_gpu: BeOn, model: Path) -> None:
    on_gpu(True)
    settings = read(["--model", str(model)])
    assert flags("transformers", settings)["--dtype"] == "bfloat16"
    assert launched("transformers", settings).calibration is None
    assert "--matmul-precision" not in flags("djinn", settings)


def test_a_type_that_is_given_is_everybodys(model: Path) -> None:
    settings = read(["--model", str(model), "--dtype", "float16"])
    for peer in ("djinn", "vllm", "transformers"):
        assert flags(peer, settings)["--dtype"] == "float16"
        assert launched(peer, settings).calibration is None
    assert read(["--model", str(model)]).dtype == "auto"


# vLLM.


def test_vllm_on_cpus_gets_the_same_kv_in_its_own_blocks(settings: ServerSettings, on_gpu: BeOn, cache: Path) -> None:
    on_gpu(False)
    assert flags("vllm", settings)["--num-gpu-blocks-override"] == str(20480 // 128)
    assert "--num-gpu-blocks-override" not in flags("vllm", replace(settings, kv_tokens=None))
    assert launched("vllm", settings).environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert "LD_PRELOAD" not in launched("vllm", settings).environment
    assert flags("vllm", settings)["--max-model-len"] == "1728"
    assert "--max-model-len" not in flags("vllm", replace(settings, context_tokens=None))
    library = cache / "vllm/lib/libiomp5.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert launched("vllm", settings).environment["LD_PRELOAD"] == str(library), "Intel's OpenMP comes first"


def test_offloading_needs_cuda_and_is_the_only_difference_there(settings: ServerSettings, on_gpu: BeOn) -> None:
    on_gpu(False)
    assert not find_peer("vllm+offload").is_installed()
    with pytest.raises(LoadgenError, match=r"vllm\+offload needs CUDA"):
        launched("vllm+offload", settings)
    on_gpu(True)
    plain, offload = flags("vllm", settings), flags("vllm+offload", settings)
    assert plain["--num-gpu-blocks-override"] == str(20480 // 16)
    assert offload == {**plain, "--kv-offloading-size": "16"}
    assert "VLLM_CPU_KVCACHE_SPACE" not in launched("vllm", settings).environment


def test_of_a_wheels_requirements_builds_for_cuda_extras_and_other_platforms_are_left_out() -> None:
    left_out = ["torch==2.13.0+cpu", "TorchCodec>=0.14", "triton==3.9.0", "pandas; extra == 'bench'"]
    kept = ["torchdata>=1", "six>=1.16.0; python_version > '3.8'", "fastapi[standard]<0.137.0"]
    assert needed_requirements([*left_out, *kept]) == ["torchdata>=1", "six>=1.16.0", "fastapi[standard]<0.137.0"]


# llama.cpp.


@pytest.mark.usefixtures("source")
def test_the_model_is_converted_once_for_each_data_type_and_each_state_of_its_weights(
    settings: ServerSettings, model: Path
) -> None:
    first = Path(flags("llamacpp", settings)["--model"])
    assert first.read_text() == f"{model} --outtype bf16"
    written = first.stat().st_mtime_ns
    assert Path(flags("llamacpp", settings)["--model"]) == first
    assert first.stat().st_mtime_ns == written
    for dtype, kind in (("float32", "f32"), ("auto", "q8_0")):
        other = Path(flags("llamacpp", replace(settings, dtype=dtype))["--model"])
        assert other.read_text() == f"{model} --outtype {kind}"
    os.utime(model / "model.safetensors", (1, 1))
    assert Path(flags("llamacpp", settings)["--model"]) != first
    checkpoint = model / "checkpoint.gguf"  # what the folder was made of
    checkpoint.symlink_to(model / "model.safetensors")
    assert flags("llamacpp", replace(settings, dtype="auto"))["--model"] == str(checkpoint)


def test_what_cannot_be_converted_says_why(settings: ServerSettings, source: LlamaCppSource) -> None:
    with pytest.raises(LoadgenError, match="not a Transformers folder"):
        launched("llamacpp", settings)
    with pytest.raises(LoadgenError, match="no data type int8, only auto, float32, bfloat16, float16"):
        launched("llamacpp", replace(settings, dtype="int8"))
    settings.model.mkdir(parents=True)
    (settings.model / "model.safetensors").write_text("weights")
    source.converter.write_text(REFUSES)
    with pytest.raises(LoadgenError, match=r"the conversion of .* for llama.cpp failed:\n.*LlamaForCausalLM"):
        launched("llamacpp", settings)


@pytest.mark.usefixtures("source", "model")
@pytest.mark.parametrize(("context", "slots"), [(1728, 11), (30000, 1), (None, SLOTS)])
def test_as_many_slots_as_have_room_for_whole_conversations(
    settings: ServerSettings, context: int | None, slots: int
) -> None:
    given = flags("llamacpp", replace(settings, context_tokens=context))
    assert (given["--parallel"], "--kv-unified" in given) == (str(slots), context is None)
    for dtype, kv in (("bfloat16", "f16"), ("float32", "f32"), ("auto", "f16")):  # as many bytes as the others have
        given = flags("llamacpp", replace(settings, dtype=dtype))
        assert (given["--cache-type-k"], given["--cache-type-v"], given["--ctx-size"]) == (kv, kv, "20480")


SERVER = """
import http.server, subprocess, sys
port = sys.argv[sys.argv.index("--port") + 1]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""
"""Lists its models, and has a child in a POSIX session of its own, as Ray's servers do."""
DIES = "import os, sys; sys.exit('no such model for ' + os.environ['MODEL'])"


@dataclass(frozen=True)
class FakePeer:
    """Runs `code`, a small real process."""

    code: str = SERVER
    name: str = "fake"
    served_model: str = "model"
    installed: bool = True

    def is_installed(self) -> bool:
        return self.installed

    def install(self, say: Say) -> None:
        raise NotImplementedError

    def launch(self, settings: ServerSettings, port: int) -> Launch:
        return Launch([sys.executable, "-c", self.code, "--port", str(port)], {"MODEL": str(settings.model)})

    def versions(self) -> dict[str, str]:
        return {"fake": "1"}


PEER = FakePeer()


def family(pid: int) -> list[psutil.Process]:
    """A server and its child."""
    server = psutil.Process(pid)
    [child] = server.children()
    return [server, child]


@pytest.fixture(autouse=True)
def stopped(cache: Path) -> Iterator[None]:
    """Nothing that a test started is left."""
    yield
    for peer in (PEER, find_peer("llamacpp")):
        if serving.running(peer) is not None:
            serving.stop(peer)


def test_what_cannot_start_says_why(settings: ServerSettings) -> None:
    with pytest.raises(LoadgenError, match="not installed: python -m loadgen peers install fake"):
        serving.start(FakePeer(installed=False), settings, None)
    with pytest.raises(LoadgenError, match="fake is not running"):
        serving.stop(PEER)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(LoadgenError, match=f"port {port} is taken"):
            serving.start(PEER, settings, port)
    with pytest.raises(ServerFailedError, match=r"ended with status 1; the end of \S+fake.log:\nno such model"):
        serving.start(FakePeer(DIES), settings, None)
    assert serving.running(PEER) is None


# `python -m loadgen peers`.


def test_a_peer_from_start_to_stop(source: LlamaCppSource, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = ["peers", "start", "llamacpp", "--dtype", "float32", "--model"]
    assert main([*start, str(model)]) == 2
    assert "llamacpp is not installed: python -m loadgen peers install llamacpp" in capsys.readouterr().err
    source.server.parent.mkdir(parents=True)
    source.server.write_text(f"#!{sys.executable}\n{SERVER}")
    source.server.chmod(0o755)
    assert main([*start, str(model)]) == 0
    found = re.search(r"--target llamacpp=(http://127\.0\.0\.1:\d+)#model", capsys.readouterr().out)
    assert found is not None
    assert httpx.get(f"{found[1]}/v1/models").is_success
    note = serving.running(find_peer("llamacpp"))
    assert note is not None
    processes = family(note.pid)
    assert main([*start, str(model)]) == 2
    assert f"running already, as process {note.pid} on {found[1]}" in capsys.readouterr().err
    assert main(["peers", "list"]) == 0
    said = capsys.readouterr().out
    assert all(peer.name in said for peer in PEERS)
    assert main(["peers", "stop", "llamacpp"]) == 0
    assert "llamacpp has stopped" in capsys.readouterr().out
    assert psutil.wait_procs(processes, timeout=30)[1] == []
    assert main(["peers", "stop", "llamacpp"]) == 2
