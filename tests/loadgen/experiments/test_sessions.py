"""`loadgen whitebox`: sessions that pause."""

from collections import Counter
from pathlib import Path

import pytest

from loadgen.cli import main
from loadgen.experiments.whitebox.experiment import STEERED, TRIALS, WAITS, sign_test
from loadgen.report.report import Report
from loadgen.targets.djinn import HISTOGRAMS
from tests.loadgen.experiments.conftest import result, sessions_on, value


@pytest.mark.parametrize(("pairs", "first", "last"), [(3, 1, 3), (8, 1, 8), (9, 2, 8), (20, 6, 15)])
def test_the_bounds_of_a_median_are_those_of_the_tables(pairs: int, first: int, last: int) -> None:
    """As they are printed, for 95 %, in tables of the sign test; up to five pairs have none, and get all."""
    found = sign_test([float(number) for number in range(pairs, 0, -1)])
    assert found is not None
    assert (found.low, found.high) == (first, last)


SEQUENCES, TOKENS, CONTEXT, OTHERS, REPEATS = 2, 24, 20, 3, 2
LOAD = f"""
    --sequences {SEQUENCES} --tokens {TOKENS} --context {CONTEXT} --others {OTHERS} --repeats {REPEATS}
    --pause-seconds 0.4 --scale 0.2 --seed 3
""".split()


def whitebox(output: Path, *arguments: str) -> int:
    return main(["whitebox", *LOAD, "--output", str(output), *arguments])


@pytest.fixture(scope="module")
def found(url: str, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """One run. Speed is missed or met as the machine pleases, so that the exit code can be either."""
    folder = tmp_path_factory.mktemp("results")
    whitebox(folder, "--target", f"djinn={url}")
    report = result(folder, "Token accuracy with a pause in every pass")
    assert report.failures == ()
    return report


def test_every_token_is_the_same_with_a_pause_in_every_pass_and_others_decode_on(found: Report) -> None:
    trials = found.rows(TRIALS)
    assert [(t["layer"], t["sequence"]) for t in trials] == [(n, s) for n in (1, 2, 3) for s in range(SEQUENCES)]
    for trial in trials:
        assert trial["plain"] == trial["paused"]
        assert (len(trial["plain"]), trial["prefill_pauses"], trial["decode_pauses"]) == (TOKENS, 1, TOKENS - 1)
    assert any(turn["differs_at"] is not None for turn in found.rows(STEERED))
    assert value(found, "paused turns that end as they would have") == REPEATS


def test_round_trips_the_servers_clock_and_its_memory(found: Report, url: str) -> None:
    calls = Counter(row["waited"] for row in found.rows(WAITS))
    assert calls["resume to the next pause"] == 3 * SEQUENCES * (TOKENS - 1)
    assert calls["read the activation"] == calls["write it back"] == 3 * SEQUENCES
    assert {row[""] for row in found.rows("The server's own clock, milliseconds")} <= set(HISTOGRAMS)
    assert value(found, "memory that sessions hold afterwards beyond before") == 0
    assert sessions_on(url) == []
