"""Programs of kernels and masks of logits on the threads that PyTorch computes with. Their
machine code is kept as long as it is what would be compiled, and a start tells of what it compiles.
"""

import ctypes
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numba.core import config
from numba.np.numpy_support import carray

import app
from app.gpu.forward.programs import Arena, Recording
from app.gpu.kernels import cpu
from app.gpu.kernels.cpu import compile, elementwise, telling_of_compilation
from app.gpu.kernels.cpu.compile import c_function, kernel_folder
from app.gpu.kernels.cpu.elementwise import forbid
from app.gpu.kernels.cpu.intrinsics import pointer
from app.gpu.kernels.cpu.launch import Program
from app.gpu.sampling.sampler import forbid_on_device

pytestmark = pytest.mark.usefixtures("one_thread")  # which puts back how many there were
ROWS, WIDTH, TIMES = 100, 512, 40


class _Arguments(ctypes.Structure):
    _fields_: ClassVar = [("number", ctypes.c_int64)]


def record_calls(argument: int) -> list[tuple[int, int]]:
    """Run a callback on PyTorch's threads; returns the thread and the argument of each call."""
    calls: list[tuple[int, int]] = []
    arguments = _Arguments(argument)

    def record(address: int | None) -> None:
        assert address is not None
        calls.append((threading.get_native_id(), _Arguments.from_address(address).number))

    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(record)
    address = ctypes.cast(callback, ctypes.c_void_p).value
    assert address is not None
    cpu.run_on_torch_threads(address, arguments)
    return calls


def doublings(tensor: torch.Tensor) -> Program:
    """Adds a tensor to itself again and again, each time in parts that threads draw."""
    recording = Recording()
    with recording.within(Arena()):
        for _ in range(TIMES):
            elementwise.add_(tensor, tensor)
    return Program(recording.launches)


def test_without_openmp_the_calling_thread_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_parallel", None)
    assert record_calls(5) == [(threading.get_native_id(), 5)]
    tensor = torch.ones(ROWS, WIDTH)
    doublings(tensor).run(0, 2)
    assert torch.equal(tensor, torch.full_like(tensor, 4.0))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_kernel_of_a_program_finds_what_the_one_before_it_has_left(count: int) -> None:
    tensor = torch.ones(ROWS, WIDTH)
    program = doublings(tensor)
    assert torch.equal(tensor, torch.ones_like(tensor)), "recording has run nothing"
    program.run(3, 5)
    assert torch.equal(tensor, torch.full_like(tensor, 4.0)), "a part of it runs by itself"
    torch.set_num_threads(count)
    for _ in range(20):
        tensor.fill_(1)
        program.run(0, TIMES)
        assert torch.equal(tensor, torch.full_like(tensor, 2.0**TIMES))


@pytest.mark.parametrize(("vocab_size", "share"), [(1, 0.0), (1, 1.0), (31, 0.5), (32, 0.5), (33, 0.5), (4096, 0.01)])
def test_only_forbidden_tokens_of_masked_rows_change(vocab_size: int, share: float) -> None:
    torch.set_num_threads(4)
    random = np.random.default_rng(vocab_size)
    logits = torch.randn(16, vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    rows = torch.tensor([5, 0, 15, 3, 7, 9, 1, 12, 2])
    allowed = random.random((len(rows), vocab_size)) < share
    words = np.full((len(rows), -(-vocab_size // 32) * 32), False)
    words[:, :vocab_size] = allowed
    bits = torch.from_numpy(np.packbits(words, axis=1, bitorder="little").view(np.int32))
    expected = logits.clone()
    expected[rows] = expected[rows].masked_fill(~torch.from_numpy(allowed), -torch.inf)
    for apply in (forbid, forbid_on_device):
        masked = logits.clone()
        apply(masked, rows, bits)
        assert torch.equal(masked, expected)


ROOT = Path(app.__path__[0]).parent
COMPILE = """
import torch
from app.gpu.kernels.cpu import elementwise
elementwise.add_(torch.ones(1, 1), torch.ones(1, 1))
[compiled] = elementwise._each_row._compiled.values()
print(compiled.cache_hits)
"""


def _kernel(address: int) -> None:
    carray(pointer(address), 1, np.int64)[0] = 7


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DJINN_CACHE_DIR", str(tmp_path))
    return kernel_folder()


def test_a_kernel_is_compiled_once(folder: Path) -> None:
    assert [c_function(_kernel).cache_hits for _ in range(3)] == [0, 1, 1]
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    assert [c_function(_kernel).cache_hits for _ in range(2)] == [0, 1], "a damaged file was not replaced"


def test_where_nothing_can_be_kept_each_start_compiles(folder: Path) -> None:
    folder.write_text("a file stands in the way")
    assert [c_function(_kernel).cache_hits for _ in range(2)] == [0, 0]


def test_machine_code_that_was_not_used_for_long_is_removed(folder: Path) -> None:
    folder.mkdir()
    (folder / "old").touch()
    (folder / "new").touch()
    os.utime(folder / "old", (time.time() - 100 * 86400,) * 2)
    c_function(_kernel)
    assert not (folder / "old").exists()
    assert (folder / "new").exists()


@pytest.mark.long
def test_a_checkout_uses_what_another_has_compiled_until_a_file_of_the_kernel_changes(tmp_path: Path) -> None:
    """A comment in a file that the kernel does not import changes nothing; other instructions do."""
    environment = {**os.environ, "DJINN_CACHE_DIR": str(tmp_path / "cache")}

    def hits(checkout: Path, **variables: str) -> int:
        told = {**environment, "PYTHONPATH": str(checkout), **variables}
        return int(subprocess.check_output([sys.executable, "-c", COMPILE], cwd=tmp_path, env=told))

    with ThreadPoolExecutor() as both:
        assert sorted(both.map(hits, [ROOT, ROOT])) == [0, 1], "one of two that start together"
    other = tmp_path / "other"
    shutil.copytree(ROOT / "app", other / "app", ignore=shutil.ignore_patterns("__pycache__"))
    assert hits(other) == 1
    assert hits(other, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="") == 0
    for name, expected in (("linear/panels.py", 1), ("cpu/intrinsics.py", 0)):
        with (other / "app/gpu/kernels" / name).open("a") as file:
            file.write("# A comment.\n")
        assert hits(other) == expected, name


@pytest.mark.parametrize("granted", [True, False])
def test_amx_is_compiled_for_only_if_the_system_grants_its_registers(granted: bool, monkeypatch: Any) -> None:
    monkeypatch.setitem(vars(config), "CPU_FEATURES", "+avx2,-sse4a,+amx-tile,+amx-bf16")
    monkeypatch.setattr(compile, "_has_tile_registers", lambda: granted)
    assert compile.compiled_features() == {"avx2"} | ({"amx-tile", "amx-bf16"} if granted else set())


def test_a_start_tells_of_the_kernels_that_it_compiles(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="app.gpu.kernels.cpu"):
        with telling_of_compilation():
            c_function(_kernel)
        assert [each.split()[0] for each in caplog.messages] == ["compiling", "compiled"]
        caplog.clear()
        with telling_of_compilation():
            c_function(_kernel)  # from the cache
        shutil.rmtree(folder)
        c_function(_kernel)  # after the start
        assert caplog.messages == []
