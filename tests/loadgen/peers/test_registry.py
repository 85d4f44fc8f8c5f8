"""What each peer is started with."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from loadgen.errors import LoadgenError
from loadgen.peers import dtype_choice, vllm
from loadgen.peers.base import ServerSettings
from loadgen.peers.registry import PEERS, find_peer
from tests.loadgen.processes.calibrations import calibration


def flags(peer: str, settings: ServerSettings) -> dict[str, str]:
    """The options that the peer is started with; the last of its command's words are pairs."""
    command = find_peer(peer).launch(settings, 8123).command
    first = next(index for index, word in enumerate(command) if word.startswith("--"))
    words = command[first:]
    return {word: following for word, following in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "on_cuda", lambda: False)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "on_cuda", lambda: True)


def test_names_are_unique() -> None:
    assert len({peer.name for peer in PEERS}) == len(PEERS)


def test_an_unknown_peer_is_told_the_names_there_are() -> None:
    with pytest.raises(LoadgenError, match=r"no peer 'sglang', only djinn, djinn\+lru"):
        find_peer("sglang")


@pytest.mark.parametrize(("peer", "policy"), [("djinn", "signal"), ("djinn+lru", "lru"), ("djinn+none", "none")])
def test_djinn_with_its_policies(settings: ServerSettings, peer: str, policy: str) -> None:
    given = flags(peer, settings)
    assert given["--kv-policy"] == policy
    assert given["--kv-device"] == "1x20480"
    assert given["--state-dir"] == "none"


def test_djinn_serves_the_checkpoint_that_a_folder_was_made_of(
    settings: ServerSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtype_choice, "calibrate", lambda model, cores: calibration("bfloat16"))
    stored = tmp_path / "stored"
    stored.mkdir()
    settings.model.mkdir(parents=True)
    (settings.model / "checkpoint").symlink_to(stored)
    assert flags("djinn", replace(settings, dtype="auto"))["--model"] == str(settings.model / "checkpoint")
    assert flags("djinn", settings)["--model"] == str(settings.model)
    stored.rmdir()
    assert flags("djinn", replace(settings, dtype="auto"))["--model"] == str(settings.model)


def test_agents_with_tools_are_found_by_what_they_continue(settings: ServerSettings) -> None:
    assert "--bind-by-prefix" in flags("djinn+tools", settings)
    assert find_peer("djinn+tools").served_model == "model+tools"


@pytest.mark.usefixtures("on_cpu")
def test_vllm_on_cpus_gets_the_same_kv_in_its_own_blocks(settings: ServerSettings) -> None:
    assert flags("vllm", settings)["--num-gpu-blocks-override"] == str(20480 // 128)
    launch = find_peer("vllm").launch(settings, 8123)
    assert launch.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"


@pytest.mark.usefixtures("on_cpu")
def test_intels_openmp_is_loaded_first_where_it_is(settings: ServerSettings, cache: Path) -> None:
    assert "LD_PRELOAD" not in find_peer("vllm").launch(settings, 8123).environment
    library = cache / "vllm/lib/libiomp5.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert find_peer("vllm").launch(settings, 8123).environment["LD_PRELOAD"] == str(library)


@pytest.mark.usefixtures("on_cpu")
def test_vllm_keeps_its_own_kv_size_unless_told(settings: ServerSettings) -> None:
    assert "--num-gpu-blocks-override" not in flags("vllm", replace(settings, kv_tokens=None))


def test_vllm_takes_conversations_as_long_as_they_become(settings: ServerSettings) -> None:
    """It does not start without KV for one context of the model's whole length, unless told of a shorter one."""
    assert "--max-model-len" not in flags("vllm", replace(settings, context_tokens=None))
    assert flags("vllm", replace(settings, context_tokens=1728))["--max-model-len"] == "1728"


@pytest.mark.usefixtures("on_cpu")
def test_offloading_needs_cuda(settings: ServerSettings) -> None:
    assert not find_peer("vllm+offload").is_installed()
    with pytest.raises(LoadgenError, match=r"vllm\+offload needs CUDA"):
        find_peer("vllm+offload").launch(settings, 8123)
    with pytest.raises(LoadgenError, match=r"vllm\+offload needs CUDA"):
        find_peer("vllm+offload").install(print)


@pytest.mark.usefixtures("on_gpu")
def test_offloading_is_the_only_difference_on_cuda(settings: ServerSettings) -> None:
    plain, offload = flags("vllm", settings), flags("vllm+offload", settings)
    assert plain["--num-gpu-blocks-override"] == str(20480 // 16)
    assert offload == {**plain, "--kv-offloading-size": "16"}
    assert "VLLM_CPU_KVCACHE_SPACE" not in find_peer("vllm").launch(settings, 8123).environment


def test_ray_divides_the_same_cores(settings: ServerSettings) -> None:
    alone, divided = flags("transformers", settings), flags("ray", settings)
    assert divided == {**alone, "--actors": "2"}
    assert find_peer("transformers").launch(settings, 8123).command[0] == sys.executable
