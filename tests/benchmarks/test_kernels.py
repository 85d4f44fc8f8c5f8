"""The comparison of CPU kernels, in few layers, on whatever processor this is."""

from __future__ import annotations

import re
import sys

import pytest
import torch

from app.gpu.linear.cpu.onednn import onednn_multiplies
from benchmarks import kernels


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kernel: str) -> str:
    smallest = ["--small", "--rows=1", "--context=16", "--repeats=1", f"--threads={torch.get_num_threads()}"]
    monkeypatch.setattr(sys, "argv", ["kernels", kernel, *smallest])
    kernels.main()
    return capsys.readouterr().out


@pytest.mark.long
def test_linears_have_a_time_in_every_way_that_this_processor_multiplies(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = run(monkeypatch, capsys, "linear")
    ways = ["float32 plain", "float32 oneDNN stored", "float32 oneDNN packed", "bfloat16 plain"]
    if onednn_multiplies(torch.bfloat16):
        ways += ["bfloat16 oneDNN stored", "bfloat16 oneDNN packed"]
    else:
        assert "oneDNN multiplies no bfloat16 on this processor: left out" in said
    kinds = ["float32", "bfloat16", "float16", "Q8_0", "Q4_0", "Q4_1"]
    ways += [f"float32 ours, {kind}" for kind in kinds]
    assert kernels.describe_processor() in said
    header, times = said.splitlines()[-2:]
    assert re.split(r"\s{2,}", header.strip()) == ["rows", *ways]
    assert len(times.split()) == 1 + len(ways)
    assert all(float(time) > 0 for time in times.split()[1:])


@pytest.mark.long
def test_attention_has_a_time_in_every_way(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = run(monkeypatch, capsys, "attention")
    header, times = said.splitlines()[-2:]
    assert len(times.split()) == len(re.split(r"\s{2,}", header.strip())) == 6
