"""The data type of servers where the command line leaves it open."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import pytest

from loadgen.options.servers import add_server_options, read_settings
from loadgen.peers import djinn, dtype_choice
from loadgen.peers.base import ServerSettings
from loadgen.peers.dtypes import AUTO
from loadgen.peers.registry import find_peer
from loadgen.processes.calibration import Calibration
from loadgen.results.inputs import Server
from loadgen.targets import TargetSpec
from tests.loadgen.processes.calibrations import calibration


@pytest.fixture
def model(settings: ServerSettings) -> str:
    settings.model.mkdir(parents=True)
    (settings.model / "config.json").write_text(json.dumps({"hidden_size": 64}))
    return str(settings.model)


def read(arguments: list[str], default: str = AUTO) -> ServerSettings:
    """What a command line with these options gives servers."""
    parser = argparse.ArgumentParser()
    add_server_options(parser, dtype=default)
    return read_settings(parser.parse_args(arguments))


def be_on(monkeypatch: pytest.MonkeyPatch, *, slow: str = "bfloat16", cuda: bool = False) -> None:
    monkeypatch.setattr(dtype_choice, "on_cuda", lambda: cuda)
    monkeypatch.setattr(dtype_choice, "calibrate", lambda model, cores: calibration(slow))


def started_with(peer: str, settings: ServerSettings) -> tuple[str, Calibration | None]:
    """The data type that a peer is told, and the figures that chose it."""
    launch = find_peer(peer).launch(settings, 8123)
    return launch.command[launch.command.index("--dtype") + 1], launch.calibration


@pytest.mark.parametrize("peer", ["vllm", "transformers", "ray"])
@pytest.mark.parametrize(("slow", "dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_rival_made_of_pytorch_gets_its_fastest_type_and_the_figures_are_kept(
    peer: str, slow: str, dtype: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_on(monkeypatch, slow=slow)
    assert started_with(peer, read(["--model", model])) == (dtype, calibration(slow))


@pytest.mark.parametrize("peer", ["djinn", "djinn+lru"])
def test_djinn_chooses_its_own_type_and_multiplies_in_the_fastest(
    peer: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, precision = read(["--model", model]), ["--matmul-precision", "bfloat16"]
    be_on(monkeypatch, slow="float32")
    assert started_with(peer, settings) == ("auto", calibration("float32"))
    assert find_peer(peer).launch(settings, 8123).command[-2:] == precision
    be_on(monkeypatch, slow="bfloat16")
    assert "--matmul-precision" not in find_peer(peer).launch(settings, 8123).command


@pytest.mark.parametrize(("dtype", "cuda"), [("float32", False), (AUTO, True)])
def test_djinn_is_told_nothing_of_products_where_a_type_is_given_or_a_gpu_multiplies(
    dtype: str, cuda: bool, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_on(monkeypatch, slow="float32", cuda=cuda)
    monkeypatch.setattr(djinn, "on_cuda", lambda: cuda)
    settings = read(["--model", model, "--dtype", dtype])
    assert "--matmul-precision" not in find_peer("djinn").launch(settings, 8123).command


def test_a_gpu_is_given_bfloat16_unmeasured(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    be_on(monkeypatch, cuda=True)
    assert started_with("transformers", read(["--model", model])) == ("bfloat16", None)


@pytest.mark.parametrize(
    ("asked", "default", "dtype"),
    [
        (["--dtype", "bfloat16"], "auto", "bfloat16"),
        (["--dtype", "float16"], "auto", "float16"),
        (["--dtype", "bfloat16"], "float32", "bfloat16"),
        ([], "float16", "float16"),
    ],
)
@pytest.mark.parametrize("peer", ["djinn", "vllm", "transformers", "ray"])
def test_a_type_that_is_given_is_everybodys(
    asked: list[str], default: str, dtype: str, peer: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_on(monkeypatch)
    assert started_with(peer, read(["--model", model, *asked], default)) == (dtype, None)


def test_auto_that_is_given_wins(model: str) -> None:
    assert read(["--model", model, "--dtype", "auto"], "float16").dtype == "auto"


def test_a_result_has_the_figures_that_chose_a_type() -> None:
    spec = replace(TargetSpec("vllm", "http://127.0.0.1:1", "model"), calibration=calibration("bfloat16"))
    assert Server.of(spec).calibration == calibration("bfloat16")
