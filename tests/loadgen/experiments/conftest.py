"""Experiments run from their command line, and the files that they leave."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import orjson
import pytest
from matplotlib.figure import Figure

import client
from loadgen.report import drawing
from loadgen.report.report import Report, read_report
from tests.processes import hear_interrupts
from tests.serving import serve
from tests.waiting import PATIENCE_S, wait_until


def result(folder: Path, *words: str) -> Report:
    """The only one in `folder`. Its page has these words, and its charts are pictures too. Nothing in it is no JSON."""
    (path,) = folder.glob("*-*.json")
    orjson.loads(path.read_bytes())
    text = path.with_suffix(".html").read_text()
    assert [word for word in words if word not in text] == []
    assert text.count("<svg") == len(list(folder.glob("*.png")))
    return read_report(path)


def value(report: Report, name: str, **by: str) -> float:
    """The median of a figure."""
    spread = report.figure(name, **by).spread
    assert spread is not None
    return spread.median


def sessions_on(url: str) -> list[client.Session]:
    """Those that a server has."""
    with client.Djinn(url, timeout=30) as djinn:
        return list(djinn.sessions.list())


def interrupt(arguments: Sequence[str], under_way: Callable[[], bool]) -> str:
    """Press Ctrl-C in `python -m loadgen` once it is `under_way`. The exit code must say so. Returns its output."""
    command = [sys.executable, "-m", "loadgen", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=hear_interrupts) as process:
        try:
            wait_until(lambda: process.poll() is not None or under_way())
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 130
    return output


@pytest.fixture(scope="module", autouse=True)
def _coarse_pictures() -> Iterator[None]:
    """To draw well takes longer than so small a run, and to draw each figure of a page again as a picture beside it.
    The tests of `loadgen/report` look at both.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "set_layout_engine", lambda *layout, **options: None)
        patch.setattr(drawing, "to_png", lambda _chart, _tables, path: path.touch())
        yield


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of each file's own, so that what is left on it was left by the load generator."""
    with serve(bind_by_prefix=False) as url:  # no session is left of chats without a name
        yield url
