from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("schema", "kv", "--zzz"), "loadgen: unknown flag --zzz. See python -m loadgen schema --help\n"),
        (
            ("density", "--target", "http://x", "--agnets", "3"),
            "loadgen: unknown flag --agnets; did you mean --agents? See python -m loadgen density --help\n",
        ),
        (
            ("density",),
            "loadgen: the following arguments are required: --target. See python -m loadgen density --help\n",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], says: str) -> None:
    done = subprocess.run([sys.executable, "-m", "loadgen", *arguments], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", says)
