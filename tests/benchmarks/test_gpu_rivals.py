"""Carrying vLLM to a GPU machine: of a library, the kernels of one architecture, as NVIDIA's own tool reads them."""

import struct
import subprocess
import tarfile
import time
from pathlib import Path
from zipfile import ZipFile

import pytest
import triton
from transformers import AutoConfig, AutoTokenizer

from app.model_store.shapes import byte_tokenizer
from benchmarks.gpu_check.context import StageContext
from benchmarks.gpu_check.plan import TINY
from benchmarks.gpu_check.reports.journal import Journal, StageRecord, read_journal
from benchmarks.gpu_check.rivals.vllm import SERVED, write_model
from benchmarks.gpu_check.stages.density import run_beside
from benchmarks.gpu_rivals.fatbin import keep_architecture
from benchmarks.gpu_rivals.packing import KERNELS, PARTS, pack
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


def test_the_rival_reads_texts_as_djinn_does(tmp_path: Path) -> None:
    write_model("random:tiny-llama", tmp_path)
    text, read = "Wien, 8 \u20ac", AutoTokenizer.from_pretrained(tmp_path)
    assert read(text).input_ids == byte_tokenizer(512).backend.encode(text).ids
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.model_type, config.num_key_value_heads, config.vocab_size) == ("llama", 2, 512)


def test_kernels_and_python_travel_apart(library: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "vllm.whl"
    with ZipFile(wheel, "w") as opened:
        opened.write(library, KERNELS[0])
        for name in ("vllm/__init__.py", "vllm/vllm-rs", "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"):
            opened.writestr(name, name)
    sizes = pack([wheel], tmp_path, 90)
    found = {}
    for part, size in zip(PARTS, sizes, strict=True):
        path = tmp_path / part / "rival.tar.xz"
        assert path.stat().st_size == size
        with tarfile.open(path) as archive:
            found[part] = archive.getnames()
    assert found == {PARTS[0]: [KERNELS[0]], PARTS[1]: ["vllm/__init__.py"]}
