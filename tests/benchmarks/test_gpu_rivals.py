"""Carrying vLLM to a GPU machine: of a library, the kernels of one architecture, as NVIDIA's own tool reads them."""

import struct
import subprocess
import time
from pathlib import Path

import pytest
import triton

from benchmarks.gpu_check.journal import Journal, StageContext, StageRecord, read_journal
from benchmarks.gpu_check.plan import TINY
from benchmarks.gpu_check.stages.agents import SERVED, run_beside
from benchmarks.gpu_rivals.packing import keep_architecture
from loadgen.peers.djinn import djinn_launch
from loadgen.processes.launch import Launch

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PTX = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry kernel() { ret; }\n"


def run(*command: object) -> str:
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, check=True)
    return done.stdout


def entry(architecture: int, code: bytes) -> bytes:
    code = code.ljust(-(-len(code) // 8) * 8, b"\0")
    return struct.pack("<HHIQIIHHIIIQQQ", 2, 0x101, 64, len(code), 0, 0, 0, 8, architecture, 64, 0, 0x11, 0, 0) + code


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with machine code for three architectures."""
    folder = tmp_path_factory.mktemp("library")
    ptx, cubin, section, path = (folder / name for name in ("k.ptx", "k.cubin", "section", "library.so"))
    ptx.write_text(PTX)
    codes = []
    for architecture in (80, 90, 120):
        run(TOOLS / ("ptxas-blackwell" if architecture > 90 else "ptxas"), f"-arch=sm_{architecture}", ptx, "-o", cubin)
        codes.append(entry(architecture, cubin.read_bytes()))
    whole = b"".join(codes)
    section.write_bytes(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(whole)) + whole)
    (folder / "empty.c").write_text("")
    run("cc", "-shared", "-o", path, folder / "empty.c")
    run("objcopy", f"--add-section=.nv_fatbin={section}", path)
    return path


def kernels_of(library: Path) -> list[str]:
    listed = run(TOOLS / "cuobjdump", "--list-elf", library)
    return [line.split(".")[-2] for line in listed.splitlines() if "sm_" in line]


def test_a_library_keeps_the_code_that_one_device_loads(library: Path, tmp_path: Path) -> None:
    assert kernels_of(library) == ["sm_80", "sm_90", "sm_120"]
    for architecture, kept in ((90, ["sm_90"]), (86, ["sm_80"]), (121, ["sm_120"])):
        pruned = tmp_path / "pruned.so"
        pruned.write_bytes(keep_architecture(library.read_bytes(), architecture))
        assert kernels_of(pruned) == kept


@pytest.mark.long
def test_agents_are_measured_on_both_servers(tmp_path: Path) -> None:
    def rival(port: int) -> Launch:
        flags = {"--model": TINY.density.model, "--served-model-name": SERVED, "--port": str(port)}
        return djinn_launch({**flags, "--state-dir": "none", "--device": "cpu"})

    path = tmp_path / "journal"
    with path.open("w") as file:
        journal = Journal(file, has_targets=False)
        run_beside(StageContext(TINY, journal, time.monotonic() + 60, tmp_path), TINY.density, rival)
    record = StageRecord("vllm", "Beside vLLM")
    read_journal(path, record)
    medians = {each.name: each.spread.median for each in record.figures if each.spread is not None}
    assert [medians[f"Turns that completed / planned, {name}"] for name in ("djinn", "vllm")] == [1, 1]
