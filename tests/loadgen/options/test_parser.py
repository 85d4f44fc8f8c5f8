from __future__ import annotations

import pytest

from loadgen.cli import main


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
            "loadgen: missing --target. See python -m loadgen density --help\n",
        ),
        (
            ("density", "--target", "djinn", "--agents", "many"),
            "loadgen: --agents takes an integer, not 'many'. See python -m loadgen density --help\n",
        ),
        (
            ("density", "--target", "djinn", "--seed"),
            "loadgen: --seed takes an integer. See python -m loadgen density --help\n",
        ),
        (("density", "--target"), "loadgen: --target takes a value: TARGET. See python -m loadgen density --help\n"),
        (
            ("density", "--target", "a=htp://"),
            "loadgen: the URL of target a must be http://HOST[:PORT] or https://..., not 'htp://'\n",
        ),
        (
            ("density", "--target", "a=127.0.0.1:80"),
            "loadgen: the URL of a target begins with http://: --target a=http://127.0.0.1:80\n",
        ),
        (
            ("peers", "start", "sglang"),
            "loadgen: there is no peer 'sglang', only djinn, djinn+lru, djinn+none, djinn+tools, "
            "djinn+tools+signals, vllm, vllm+offload, llamacpp, transformers, ray; deepspeed can only be installed\n",
        ),
        (
            ("peers", "start", "deepspeed"),
            "loadgen: deepspeed is a library without a server: it can be installed, but not started or measured\n",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert (code, *capsys.readouterr()) == (2, "", says)
