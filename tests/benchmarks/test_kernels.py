"""The comparison of CPU kernels, in few layers, on whatever processor this is."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from benchmarks import kernels


@pytest.mark.long
@pytest.mark.parametrize("kernel", ["linear", "attention"])
def test_every_way_of_a_kernel_has_a_time(
    kernel: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    smallest = ["--small", "--rows=1", "--context=16", "--repeats=1", f"--threads={torch.get_num_threads()}"]
    monkeypatch.setattr(sys, "argv", ["kernels", kernel, *smallest])
    kernels.main()
    header, times = capsys.readouterr().out.splitlines()[-2:]
    assert len(times.split()) == len(re.split(r"\s{2,}", header.strip())) > 5
    assert all(float(time) > 0 for time in times.split()[1:])
