"""The data types that peers are compared in."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers.peers import default_dtypes
from loadgen.peers import dtype_choice


@pytest.mark.parametrize(
    ("flags", "dtypes"), [("avx2 fma", ("float32",)), ("avx2 avx512_bf16", ("float32", "bfloat16"))]
)
def test_bfloat16_is_compared_where_the_processor_multiplies_it(
    flags: str, dtypes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n")
    monkeypatch.setattr(dtype_choice, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(dtype_choice, "on_cuda", lambda: False)
    assert default_dtypes() == dtypes
