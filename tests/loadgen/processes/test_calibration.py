"""The fastest type of PyTorch: measured once for each processor, PyTorch and shape."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadgen.errors import LoadgenError
from loadgen.processes import calibration as room
from loadgen.processes.calibration import Calibration, calibrate
from loadgen.processes.processor import processor_flags
from tests.loadgen.processes.calibrations import calibration


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DJINN_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "intermediate_size": 128}))
    return tmp_path


def forbid_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "PROBE", "loadgen.rivals.no_such_program")


def test_types_are_measured_once_and_remembered(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = calibrate(model, 1)
    assert (first.outputs, first.inputs, first.cores, first.flags) == (128, 64, 1, processor_flags())
    assert set(first.seconds) == {"float32", "bfloat16"}
    assert all(len(seconds) == len(first.rows) and min(seconds) > 0 for seconds in first.seconds.values())
    forbid_measuring(monkeypatch)
    assert calibrate(model, 1) == first


def test_another_processor_is_measured_anew(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrate(model, 1)
    forbid_measuring(monkeypatch)
    monkeypatch.setattr(room, "processor_flags", lambda: ("avx2", "avx512f", "amx_bf16"))
    with pytest.raises(LoadgenError, match="measuring data types failed; name one with --dtype"):
        calibrate(model, 1)


def test_a_damaged_note_is_measured_anew(model: Path) -> None:
    calibrate(model, 1)
    (note,) = (model / "cache/calibration").iterdir()
    note.write_text("{}")
    assert isinstance(calibrate(model, 1), Calibration)


def test_a_model_without_shapes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadgenError, match="no shapes in"):
        calibrate(tmp_path, 1)


@pytest.mark.parametrize(
    ("prompt_s", "dtype"), [(0.011, "bfloat16"), (0.019, "bfloat16"), (0.021, "float32"), (0.1, "float32")]
)
def test_decoding_and_prompts_count_alike(prompt_s: float, dtype: str) -> None:
    """Bfloat16 decodes in half the time: its prompts may take up to twice as long."""
    made = calibration("float32")
    seconds: dict[str, tuple[float, ...]] = {"float32": (0.002, 0.01), "bfloat16": (0.001, prompt_s)}
    assert replace(made, seconds=seconds).dtype == dtype
