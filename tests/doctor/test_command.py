"""`djinn doctor` as a user runs it, on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from app.cli import main
from tests.doctor.reports import OF_A_CPU

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def test_a_machine_in_order_ends_with_0_and_prints_a_line_for_each_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--device", "cpu", "--state-dir", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for name in OF_A_CPU:
        assert name.replace("_", " ") in out
    assert str(tmp_path) in out


def test_json_is_all_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cpu", "--state-dir", "none", "--json"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert (report["device"], report["facts"]["disk"], err) == ("cpu", None, "")


@without_gpu
def test_an_error_ends_with_1_and_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cuda", "--state-dir", "none"]) == 1
    out, _ = capsys.readouterr()
    assert out.startswith("error    device              PyTorch cannot use cuda:0: ")
    assert "\n         -> install a PyTorch with CUDA" in out


def test_the_settings_of_the_server_are_the_doctors_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("DJINN_DEVICE", "cpu")
    monkeypatch.setenv("DJINN_STATE_DIR", str(file / "state"))
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["device"], report["facts"]["disk"]["folder"]) == ("cpu", str(file))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--device", "abacus"), "auto, cpu, cuda or cuda:N"),
        (("--port", "1"), "djinn: unknown flag --port. See djinn doctor --help"),
    ],
)
def test_what_the_user_got_wrong_ends_with_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], says: str
) -> None:
    try:
        status: int | str | None = main(["doctor", *arguments])
    except SystemExit as leave:  # argparse
        status = leave.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert says in err
