"""The data type of servers where the command line leaves it open."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from loadgen.options.servers import add_server_options, read_settings
from loadgen.peers import dtype_choice
from loadgen.peers.base import ServerSettings
from loadgen.peers.dtype_choice import multiplies_bfloat16
from loadgen.peers.registry import find_peer

AVX2 = "processor\t: 0\nmodel name\t: AMD EPYC\nflags\t\t: fpu sse2 avx f16c avx2 fma\nbogomips\t: 4890.00\n"
AVX512 = AVX2.replace("fma", "fma avx512f avx512bw avx512vl avx512_vnni")
AVX512_BF16 = AVX512.replace("avx512_vnni", "avx512_vnni avx512_bf16")
AMX = AVX512.replace("avx512_vnni", "avx512_vnni amx_tile amx_bf16")
ARM = "processor\t: 0\nBogoMIPS\t: 2000.00\nFeatures\t: fp asimd sve\nCPU implementer\t: 0x41\n"
ARM_BF16 = ARM.replace("sve", "sve svebf16 i8mm bf16")


@pytest.fixture
def model(settings: ServerSettings) -> str:
    settings.model.mkdir(parents=True)
    (settings.model / "config.json").write_text("{}")
    return str(settings.model)


def read(arguments: list[str], default: str = dtype_choice.AUTO) -> ServerSettings:
    """What a command line with these options gives servers."""
    parser = argparse.ArgumentParser()
    add_server_options(parser, dtype=default)
    return read_settings(parser.parse_args(arguments))


def be_on(monkeypatch: pytest.MonkeyPatch, folder: Path, cpuinfo: str, *, cuda: bool = False) -> None:
    path = folder / "cpuinfo"
    path.write_text(cpuinfo)
    monkeypatch.setattr(dtype_choice, "CPUINFO", path)
    monkeypatch.setattr(dtype_choice, "on_cuda", lambda: cuda)


@pytest.mark.parametrize(
    ("cpuinfo", "native"),
    [(AVX2, False), (AVX512, False), (AVX512_BF16, True), (AMX, True), (ARM, False), (ARM_BF16, True), ("", False)],
)
def test_the_processors_flags_tell_whether_it_multiplies_bfloat16(cpuinfo: str, native: bool) -> None:
    assert multiplies_bfloat16(cpuinfo) == native


def test_a_processor_is_not_known_by_its_name() -> None:
    assert not multiplies_bfloat16(AVX2.replace("AMD EPYC", "a bf16 processor"))


@pytest.mark.parametrize("peer", ["djinn", "djinn+lru", "vllm", "transformers", "ray"])
@pytest.mark.parametrize(("cpuinfo", "dtype"), [(AVX2, "float32"), (AVX512_BF16, "bfloat16")])
def test_every_server_is_started_with_the_type_that_was_chosen(
    peer: str, cpuinfo: str, dtype: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_on(monkeypatch, tmp_path, cpuinfo)
    command = find_peer(peer).launch(read(["--model", model]), 8123).command
    assert command[command.index("--dtype") + 1] == dtype


def test_a_gpu_is_given_bfloat16_beside_any_processor(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_on(monkeypatch, tmp_path, AVX2, cuda=True)
    assert read(["--model", model]).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("asked", "default", "dtype"),
    [
        (["--dtype", "bfloat16"], "auto", "bfloat16"),
        (["--dtype", "float16"], "auto", "float16"),
        (["--dtype", "bfloat16"], "float32", "bfloat16"),
        ([], "float16", "float16"),
        (["--dtype", "auto"], "float16", "float32"),
    ],
)
def test_a_type_that_is_given_wins(
    asked: list[str], default: str, dtype: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_on(monkeypatch, tmp_path, AVX2)
    assert read(["--model", model, *asked], default).dtype == dtype


def test_where_the_kernel_does_not_tell_it_is_float32(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_on(monkeypatch, tmp_path, AVX512_BF16)
    (tmp_path / "cpuinfo").unlink()
    assert read(["--model", model]).dtype == "float32"
