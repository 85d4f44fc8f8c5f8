"""What cannot start says why in one line, and leaves no file; what is interrupted leaves what it measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import client
from loadgen.cli import main
from loadgen.commands.schema import RESULTS
from tests.loadgen.experiments.running import result, sessions_on
from tests.loadgen.interrupting import interrupt
from tests.serving import serve

NOBODY = "a=http://127.0.0.1:9"
REFUSED = {
    "capacity": [
        (f"--target {NOBODY} --least 0", "--least must be at least 1, not 0"),
        (f"--target {NOBODY} --least 9 --most 8", "--most must be at least --least, which is 9, not 8"),
        (f"--target {NOBODY} --slo-tpot nan", "--slo-tpot must be above 0 and finite, in seconds, not nan"),
        (f"--target {NOBODY} --turns 1", "--turns must be at least 2"),
        (f"--target {NOBODY} --agents 4", "unknown flag --agents"),
    ],
    "cluster": [
        ("--replicas 0", "from 1 to 64"),
        ("--kills 2", "--kills has no effect without --kill-every"),
        ("--routers hash,hash", "once each"),
        ("--routers owner,luck", "--routers: must be owner, hash, or both"),
        ("--moves-per-second -1", "--moves-per-second must be"),
    ],
    "density": [
        (f"--target {NOBODY}", "measuring target a failed: GET http://127.0.0.1:9/"),
        ("--target a=URL --context 2000 --turns 1", "last turn ends at"),
        ("--target a=URL#", "NAME=URL#MODEL"),
        ("--target a=URL/v1/#tiny-llama", "without /v1"),
        ("--target a=URL#gpt-9", "no model gpt-9, only tiny-llama"),
        ("--target a=URL --target a=URL#tiny-llama", "its own name: a, a"),
        ("--target a=URL --api-key b=secret", "--api-key for no target that is up: b"),
        ("--target a=URL --api-key secret", "--api-key is NAME=VALUE"),
        ("--target a=URL --api-key a=x --api-key a=y", "--api-key is given twice for a"),
        ("--target a=http://me:secret@127.0.0.1:9", "the URL of target a must be without a user"),
        ("--target a=URL --context 9 --system-tokens 9", "--context must be above --system-tokens"),
        ("--target a=URL --repeats 0", "repeats must be at least 1"),
        ("--target a=URL --warmup -1", "warmup must be at least 0"),
        ("--target a=URL --turn-timeout 0", "--turn-timeout must be above 0"),
        ("--target a=URL --texts /nowhere.jsonl", "/nowhere.jsonl"),
        ("--target a=URL --output /dev/null/x", "cannot write to /dev/null/x"),
    ],
    "kv": [
        ("--target a=URL#tiny-llama", "this experiment is for Djinn servers"),
        ("--target a=URL --tokens 2000", "has room for 1024"),
        ("--target a=URL --repeats 0", "repeats must be at least 1"),
        ("--target a=URL --link wifi", "--link is NAME=GB/s"),
        ("--target a=URL --link bus=3 --link bus=4", "every link needs its own name"),
    ],
    "migrate": [
        ("--target A=URL", "migrate takes two targets"),
        (f"--target b=URL --target {NOBODY}", "measuring target a failed"),
        ("--target A=URL --target B=URL --lengths 2000", "has room for 1024"),
        ("--target A=URL --target B=URL --lengths 5,5", "lengths must be different"),
        ("--target A=URL --target B=URL --decoded 0", "decoded must be at least 1"),
    ],
    "oversubscribe": [
        ("--target a=URL --context 2000", "has room for"),
        ("--target a=URL --sessions 0", "sessions must be at least 1"),
        ("--target a=URL --context 67", "--context must be at least 68"),
    ],
    "resume-latency": [
        ("--target a=URL --lengths 2000", "has room for"),
        ("--target a=URL --lengths 64,64", "lengths must be different numbers from 2"),
        ("--target a=URL --depths nan", "depths must be above 0 and at most 100"),
        ("--target a=URL --repeats 0", "repeats must be at least 1"),
    ],
    "simulate": [
        ("", "costs are missing"),
        ("--validate 1", "--validate needs a --target"),
        ("--event flood@3", "an event is"),
        ("--target djinn --target djinn+lru", "one target"),
    ],
    "soak": [
        ("--minutes 0", "minutes must be a number above 0"),
        ("--every nan", "every must be a number above 0"),
        ("--agents 0", "agents must be at least 1"),
        ("--context 103", "context must be at least 104"),
    ],
    "weights": [
        ("--model /nowhere", "no model in /nowhere"),
        ("--budget lots", "--budget"),
        ("--batches 1,1", "batches must be different numbers from 1"),
        ("--prompt 63 --batches 32", "prompt must be at least 64: 2 tokens for each session"),
        ("--chunks 1MiB", "--chunks are for --sweep"),
        ("--sweep --cold", "leave --batches and --cold out"),
    ],
    "whitebox": [
        ("--target a=URL --layers 4", "layers must be from 0 to 3"),
        ("--target a=URL --layers 3,3", "layers"),
        ("--target a=URL --layers 1,x", "--layers"),
        ("--target a=URL --context 2000", "has room for 1024"),
        ("--target a=URL --tokens 1", "tokens must be at least 2"),
        ("--target a=URL --scale nan", "scale"),
        ("--target a=URL --pause-seconds 0", "--pause-seconds"),
    ],
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serve() as url:
        yield url


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


@pytest.mark.parametrize(
    ("settings", "experiment", "message"),
    [
        ({"kv_policy": "lru"}, "resume-latency", "does not listen to signals"),
        ({"kv_device": 64 << 20, "kv_host": 256 << 20}, "resume-latency", "should hold little more than the longest"),
    ],
)
def test_a_server_that_cannot_be_measured_says_why(
    settings: dict[str, Any], experiment: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(**settings) as url:
        assert main([experiment, "--target", f"a={url}", "--lengths", "40", "--output", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


Look = Callable[[client.Djinn], float]


def moves_out(djinn: client.Djinn) -> float:
    return djinn.memory().moves["out"].count


def running(djinn: client.Djinn) -> float:
    return len(list(djinn.sessions.list(state="running")))


@pytest.mark.long
@pytest.mark.parametrize(
    ("experiment", "arguments", "device", "look", "enough"),
    [
        ("resume-latency", "--lengths 40 --depths 100 --repeats 100", "1x256", moves_out, 4),
        ("whitebox", "--layers 1 --sequences 1 --tokens 8 --others 3 --pause-seconds 3600", "4MiB", running, 3),
        ("oversubscribe", "--sessions 300 --context 96 --turns 3 --tokens 4", "2x96", moves_out, 4),
        ("kv", "--tokens 64 --repeats 300 --decoded 8", "4MiB", moves_out, 3),
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
    made = result(tmp_path / "out", RESULTS[experiment])
    assert made.interrupted
    assert not made.succeeded
