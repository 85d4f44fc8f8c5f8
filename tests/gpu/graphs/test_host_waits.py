"""Work that makes the host wait for a CUDA device is found, and nothing of that outlasts it."""

from __future__ import annotations

import warnings

import pytest
import torch

from app.gpu.graphs.recorder import waiting_forbidden


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """PyTorch's mode on a machine without CUDA, with the warning that PyTorch gives once it has been set."""
    now: list[object] = [1]

    def set_mode(mode: object) -> None:
        now[0] = mode
        if mode == "error":
            warnings.warn("Synchronization debug mode is a prototype feature", UserWarning, stacklevel=2)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    return now


def test_the_mode_is_what_it_was_afterwards(mode: list[object]) -> None:
    with waiting_forbidden():
        assert mode == ["error"]
    assert mode == [1]


def test_the_mode_is_what_it_was_after_an_error(mode: list[object]) -> None:
    with pytest.raises(ValueError, match="of the work"), waiting_forbidden():
        raise ValueError("of the work")
    assert mode == [1]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_work_that_waits_raises() -> None:
    x, before = torch.ones(8, device="cuda"), torch.cuda.get_sync_debug_mode()
    with pytest.raises(RuntimeError, match="synchronizing"), waiting_forbidden():
        x.sum().item()
    assert torch.cuda.get_sync_debug_mode() == before
    assert x.sum().item() == 8
