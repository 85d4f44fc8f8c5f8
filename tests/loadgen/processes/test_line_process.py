"""Programs that answer lines, and what else they may do."""

from __future__ import annotations

import sys

import pytest

from loadgen.errors import LoadgenError
from loadgen.processes.line_process import line_process

ECHO = "import json, sys\nfor line in sys.stdin: print(json.dumps({'was': json.loads(line)}), flush=True)"


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


async def test_it_answers_each_line() -> None:
    async with line_process(python(ECHO), LoadgenError) as process:
        assert await process.ask({"a": 1}) == {"was": {"a": 1}}
        assert await process.ask({"b": [2, 3]}) == {"was": {"b": [2, 3]}}


async def test_a_long_answer_is_whole() -> None:
    async with line_process(python(ECHO), LoadgenError) as process:
        long = {"tokens": list(range(200_000))}
        assert await process.ask(long) == {"was": long}


async def test_it_gets_variables() -> None:
    program = "import json, os\ninput()\nprint(json.dumps({'found': os.environ['WHAT']}), flush=True)"
    async with line_process(python(program), LoadgenError, {"WHAT": "this"}) as process:
        assert await process.ask({}) == {"found": "this"}


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("raise SystemExit('the model is too large')", "it ended with status 1: the model is too large"),
        ("print('Loading ...', flush=True); input(); input()", "it did not answer, but say b'Loading"),
    ],
)
async def test_one_that_does_not_answer_says_why(program: str, message: str) -> None:
    async with line_process(python(program), LoadgenError) as process:
        with pytest.raises(LoadgenError, match=message):
            await process.ask({})
