"""What is published about how a process under test was started."""

import sys
from pathlib import Path

import pytest

from loadgen.peers.djinn import djinn_launch
from loadgen.processes.launch import Launch, without_folders


def test_a_published_launch_tells_nothing_about_the_machine() -> None:
    launch = Launch(
        ["/home/me/djinn/.venv/bin/python", "-m", "app", "serve", "--model", "/models/smollm2", "--port", "0"],
        {
            "LD_PRELOAD": "/home/me/.cache/djinn/peers/vllm/lib/libiomp5.so",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": "/home/me/djinn",
        },
    )

    published = without_folders(launch, [Path("/home/me/djinn"), Path("/home/me/.cache/djinn/peers"), Path("/models")])

    assert published.command == [".venv/bin/python", "-m", "app", "serve", "--model", "smollm2", "--port", "0"]
    assert published.environment == {"LD_PRELOAD": "vllm/lib/libiomp5.so", "HF_HUB_OFFLINE": "1", "PYTHONPATH": "."}


@pytest.mark.parametrize("prefix", ["/home/me/djinn/.venv", "/opt/environments/djinn"])
def test_the_interpreter_is_published_as_that_of_the_checkout(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    monkeypatch.setattr(sys, "prefix", prefix)
    monkeypatch.setattr(sys, "executable", f"{prefix}/bin/python")
    launch = djinn_launch({"--model": "/models/smollm2"})

    published = without_folders(launch, [Path("/home/me/djinn"), Path("/home/me/.cache/djinn/peers"), Path("/models")])

    assert published.command == [".venv/bin/python", "-P", "-m", "app", "serve", "--model", "smollm2"]
