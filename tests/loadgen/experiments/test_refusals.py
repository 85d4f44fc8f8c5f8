"""What cannot start says why in one line, and leaves no file; what is interrupted leaves what it measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import client
from loadgen.cli import main
from tests.loadgen.experiments.conftest import interrupt, result, sessions_on
from tests.serving import serve

NOBODY = "a=http://127.0.0.1:9"
REFUSED = {
    "capacity": [
        (f"--target {NOBODY} --least 0", "--least must be at least 1"),
        (f"--target {NOBODY} --slo-tpot nan", "--slo-tpot must be above 0 and finite, in seconds, not nan"),
        (f"--target {NOBODY} --turns 1", "--turns must be at least 2"),
    ],
    "chaos": [
        ("--minutes 0", "minutes must be a number above 0"),
        ("--moves-per-second 2", "--moves-per-second needs replicas"),
        ("--standby", "standby needs replicas"),
    ],
    "density": [
        (f"--target {NOBODY}", "measuring target a failed: GET http://127.0.0.1:9/"),
        ("--target a=URL --context 2000 --turns 1", "last turn ends at"),
        ("--target a=URL#", "NAME=URL#MODEL"),
        ("--target a=URL/v1/#tiny-llama", "without /v1"),
        ("--target a=URL#gpt-9", "no model gpt-9, only tiny-llama"),
        ("--target a=URL --target a=URL#tiny-llama", "its own name: a, a"),
        ("--target a=URL --api-key secret", "--api-key is NAME=VALUE"),
        ("--target a=http://me:secret@127.0.0.1:9", "the URL of target a must be without a user"),
        ("--target a=URL --context 9 --system-tokens 9", "--context must be above --system-tokens"),
        ("--target a=URL --output /dev/null/x", "cannot write to /dev/null/x"),
        (f"--target {NOBODY} --rate nan", "--rate must be"),
        (f"--target {NOBODY} --think 2:1", "think time"),
        (f"--target {NOBODY} --burstiness 2", "--burstiness has no effect"),
        (f"--target {NOBODY} --tool-think 1:2", "--tool-think has no effect"),
        (f"--target {NOBODY} --trace a --think 5:15 --burstiness 1", "leave out --burstiness, --think: --trace"),
    ],
    "kv": [
        ("--target a=URL#tiny-llama", "this experiment is for Djinn servers"),
        ("--target a=URL --tokens 2000", "has room for 1024"),
        ("--target a=URL --to b=URL --lengths 2000", "has room for 1024"),
        ("--target a=URL --target b=URL --to c=URL", "--to takes the sessions of one target"),
    ],
    "whitebox": [("--target a=URL --layers 4", "layers must be from 0 to 3")],
}


@pytest.mark.parametrize(
    ("experiment", "arguments", "message"), [(name, *each) for name, cases in REFUSED.items() for each in cases]
)
def test_what_cannot_start_says_why(
    url: str, experiment: str, arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main([experiment, "--output", str(tmp_path), *arguments.replace("URL", url).split()])
    except SystemExit as ended:
        code = ended.code
    told = capsys.readouterr().err
    assert code == 2
    assert message in told
    assert "secret" not in told
    assert list(tmp_path.iterdir()) == []


Look = Callable[[client.Djinn], float]


def running(djinn: client.Djinn) -> float:
    return len(list(djinn.sessions.list(state="running")))


@pytest.mark.long
@pytest.mark.parametrize(
    ("experiment", "arguments", "device", "look", "enough"),
    [
        ("whitebox", "--layers 1 --sequences 1 --tokens 8 --others 3 --pause-seconds 3600", "4MiB", running, 3),
        ("kv", "--tokens 64 --repeats 300 --decoded 8", "4MiB", lambda djinn: djinn.memory().moves["out"].count, 3),
    ],
)
def test_an_interrupted_run_leaves_what_it_measured(
    experiment: str, arguments: str, device: str, look: Look, enough: float, tmp_path: Path
) -> None:
    """It would go on for long: Ctrl-C comes once something is under way."""
    disk: dict[str, Any] = {"state_dir": tmp_path / "state", "kv_disk": 16 << 20}
    with serve(kv_device=device, max_running=8, **disk) as url, client.Djinn(url, timeout=30) as djinn:
        command = [experiment, "--target", f"djinn={url}", *arguments.split(), "--output", str(tmp_path / "out")]
        interrupt(command, lambda: look(djinn) >= enough)
        assert sessions_on(url) == []
    made = result(tmp_path / "out")
    assert made.interrupted
    assert not made.succeeded
