"""What an engine's process says of itself while it works."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from app.domain.values import SamplingParams, SessionId, StopRule, Ticket
from app.engine_process import host
from app.engine_process.channel import Channel
from app.engine_process.child import Child
from app.engine_process.codec import decode, encode
from app.engine_process.frames import Beat
from app.engine_process.host import _Host
from app.engine_process.loading import load_frame
from app.gpu.attention.batch import Batch
from app.gpu.models.base import LayerStack
from app.messages import Open, Submit, TurnFinished
from app.model_store.shapes import shape_config
from tests.gpu.breakpoints.breaking_models import TinyModel, prompt
from tests.gpu.conftest import tiny_llama
from tests.gpu.wrapping import WrappedStack
from tests.serving import tiny_settings

__all__ = ["tiny_llama"]

SECONDS = 60.0
BEATS = 4
"""Of each layer."""
TOKENS = 80
"""More than a recorded program of all layers takes."""


class SlowStack(WrappedStack):
    """Each layer lasts for some beats of its process."""

    def __init__(self, stack: LayerStack) -> None:
        super().__init__(stack)
        self.beats = threading.Semaphore(0)
        self.is_slow = False
        """Not while an engine is put together."""
        self.layers = 0

    def layer(self, index: int, hidden: Tensor, batch: Batch, kv: Tensor) -> Tensor:
        if self.is_slow:
            for _ in range(BEATS):
                assert self.beats.acquire(timeout=SECONDS)
            self.layers += 1
        return super().layer(index, hidden, batch, kv)


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = (Channel(end) for end in socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_a_step_whose_layers_get_on_is_not_taken_for_one_that_hangs(
    tiny_llama: TinyModel, channels: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "BEAT_S", 0.02)
    ours, theirs = channels
    stack = SlowStack(tiny_llama.stack)
    engine = replace(tiny_llama, stack=stack).engine(max_step_tokens=TOKENS)
    stack.is_slow = True
    with socket.socket() as nobody:
        served = _Host(theirs, nobody, engine)
    threading.Thread(target=served._beat, daemon=True).start()
    running = threading.Thread(target=engine.run, args=(served.deliver,))
    running.start()
    engine.send(Open(Ticket(1), SessionId("s"), ""))
    engine.send(Submit(Ticket(2), SessionId("s"), tuple(prompt(1, TOKENS)), SamplingParams(seed=0), StopRule(1)))
    busy: list[float] = []
    while True:
        data = ours.receive(SECONDS)
        assert data is not None
        frame = decode(data)
        if isinstance(frame, Beat):
            busy.append(frame.busy_s)
            stack.beats.release()
        elif isinstance(frame, list) and any(isinstance(event, TurnFinished) for event in frame):
            break
    engine.stop()
    running.join(SECONDS)
    assert stack.layers == tiny_llama.num_layers
    assert 0 < max(busy) <= (BEATS + 2) * host.BEAT_S


def test_an_engine_that_loads_ends_with_its_server(tmp_path: Path) -> None:
    shape_config("tiny-llama").save_pretrained(tmp_path)
    os.mkfifo(tmp_path / "model.safetensors")  # nobody ever writes it: the model takes for ever to load
    settings = tiny_settings(model=str(tmp_path))
    child = Child()
    child.channel.send(encode(load_frame(settings, logging.WARNING)))
    child.channel.close()
    assert child.wait() == f"its process ended with status {host.ORPHANED}"
