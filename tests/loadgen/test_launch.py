"""Processes under test: how they were started, as it is published; where they are, and on which processor."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from app.settings import Settings
from loadgen.errors import LoadgenError
from loadgen.peers.djinn import djinn_launch
from loadgen.processes.folders import cache_folder, default_model, peers_folder
from loadgen.processes.launch import Launch, without_folders
from loadgen.processes.line_process import line_process
from loadgen.processes.processor import MASKS, flags_in, processor_flags

FOLDERS = [Path("/home/me/djinn"), Path("/home/me/.cache/djinn/peers"), Path("/models")]


def test_a_published_launch_tells_nothing_about_the_machine() -> None:
    launch = Launch(
        ["/home/me/djinn/.venv/bin/python", "-m", "app", "serve", "--model", "/models/smollm2", "--port", "0"],
        {
            "LD_PRELOAD": "/home/me/.cache/djinn/peers/vllm/lib/libiomp5.so",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": "/home/me/djinn",
        },
    )
    published = without_folders(launch, FOLDERS)
    assert published.command == [".venv/bin/python", "-m", "app", "serve", "--model", "smollm2", "--port", "0"]
    assert published.environment == {"LD_PRELOAD": "vllm/lib/libiomp5.so", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "."}
    ours = without_folders(djinn_launch({"--model": "/models/smollm2"}), FOLDERS).command
    assert ours == [f".venv/bin/{Path(sys.executable).name}", "-P", "-m", "app", "serve", "--model", "smollm2"]


def test_models_and_peers_are_where_the_server_keeps_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DJINN_CACHE_DIR", raising=False)
    assert cache_folder() == Settings().cache_dir
    monkeypatch.setenv("DJINN_CACHE_DIR", str(tmp_path))
    assert cache_folder() == Settings().cache_dir == tmp_path
    assert (default_model().parent, peers_folder()) == (tmp_path / "models", tmp_path / "peers")


# The processor.

X86 = "processor\t: 0\nmodel name\t: a bf16 sve processor\nflags\t\t: fpu avx f16c fma {}\nbogomips\t: 4890.00\n"
ARM = "processor\t: 0\nBogoMIPS\t: 2000.00\nFeatures\t: fp {}\nCPU implementer\t: 0x41\n"


@pytest.mark.parametrize(
    ("cpuinfo", "flags"),
    [
        (X86.format("avx512_bf16 avx2 avx512f avx512_vnni"), ("avx2", "avx512f", "avx512_vnni", "avx512_bf16")),
        (ARM.format("asimd bf16 sve"), ("asimd", "bf16", "sve")),
        ("", ()),
    ],
)
def test_only_the_flags_that_count_are_read_and_no_name(cpuinfo: str, flags: tuple[str, ...]) -> None:
    assert flags_in(cpuinfo) == flags


def test_a_processor_of_which_a_part_is_masked_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MASKS:
        monkeypatch.delenv(name, raising=False)
    plain = processor_flags()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert processor_flags() == (*plain, "onednn_avx2")


# Programs that answer lines.

ECHO = "import json, os\nwhile True: print(json.dumps({'was': json.loads(input()), 'x': os.environ['X']}), flush=True)"


async def test_a_program_gets_variables_and_answers_each_line_whole() -> None:
    async with line_process([sys.executable, "-c", ECHO], LoadgenError, {"X": "this"}) as process:
        for asked in ({"a": 1}, {"tokens": list(range(200_000))}):
            assert await process.ask(asked) == {"was": asked, "x": "this"}


async def test_a_program_that_does_not_answer_says_why() -> None:
    async with line_process([sys.executable, "-c", "raise SystemExit('too large')"], LoadgenError) as process:
        with pytest.raises(LoadgenError, match="it ended with status 1: too large"):
            await process.ask({})
