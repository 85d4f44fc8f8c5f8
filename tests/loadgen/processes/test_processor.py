"""The processor by its flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.processes import processor
from loadgen.processes.processor import MASKS, flags_in, processor_flags
from loadgen.results.origin import machine

X86 = "processor\t: 0\nmodel name\t: a bf16 sve processor\nflags\t\t: fpu avx f16c fma {}\nbogomips\t: 4890.00\n"
ARM = "processor\t: 0\nBogoMIPS\t: 2000.00\nFeatures\t: fp {}\nCPU implementer\t: 0x41\n"


@pytest.mark.parametrize(
    ("cpuinfo", "flags"),
    [
        (X86.format("avx2"), ("avx2",)),
        (X86.format("avx512_bf16 avx2 avx512f avx512_vnni"), ("avx2", "avx512f", "avx512_vnni", "avx512_bf16")),
        (X86.format("amx_tile amx_int8 avx512f amx_bf16"), ("avx512f", "amx_bf16", "amx_int8")),
        (ARM.format("asimd bf16 sve"), ("asimd", "bf16", "sve")),
        ("", ()),
    ],
)
def test_only_the_flags_that_count_are_read_and_no_name(cpuinfo: str, flags: tuple[str, ...]) -> None:
    assert flags_in(cpuinfo) == flags


def test_a_machine_is_shown_by_its_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(X86.format("avx2 avx512f"))
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    assert str(machine()).startswith("avx2 avx512f, ")
    (tmp_path / "cpuinfo").unlink()
    assert processor_flags() == ()
    assert str(machine()).startswith("no vector flags known, ")


def test_a_processor_of_which_a_part_is_masked_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpuinfo").write_text(X86.format("avx2 avx512f"))
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    for name in MASKS:
        monkeypatch.delenv(name, raising=False)
    assert processor_flags() == ("avx2", "avx512f")
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert processor_flags() == ("avx2", "avx512f", "onednn_avx2")
    monkeypatch.setenv("NUMBA_CPU_NAME", "haswell")
    assert processor_flags() == ("avx2", "avx512f", "onednn_avx2", "numba_haswell")
