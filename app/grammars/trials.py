"""Grammars tried out in a process of their own, before the server compiles them.

Some small grammars take minutes or gigabytes, and a compilation that has begun cannot be stopped. A process can.
"""

import json
import select
import signal
import subprocess
import sys
from pathlib import Path

from app.grammars import trial
from app.grammars.vocabulary import Vocabulary

TIMEOUT_S = 30.0
"""For an answer. The process ends itself after much less time of a processor; this is for a machine that stalls."""


class Trials:
    """Starts the process at the first trial, and again after a grammar has ended it. For one thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[str] | None = None

    def error(self, source: str) -> str | None:
        """What is wrong with a grammar in llguidance's form; None: nothing."""
        process = self._process or self._start()
        answer = _ask(process, source)
        if answer:
            words = json.loads(answer)
            assert words is None or isinstance(words, str)
            return words
        process.kill()
        ended_by = process.wait()
        self.close()
        if ended_by == -signal.SIGPROF:
            return f"it takes more than {trial.CPU_S:g} s to compile"
        return "it takes too much memory or time to compile"

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with process:  # closes the pipes, and waits
                pass

    def _start(self) -> subprocess.Popen[str]:
        # -P: the folder of the program is no place to import from.
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", str(Path(trial.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # a Ctrl-C at the server's terminal is for the server
        )
        if not _ask(process, self._vocabulary.arguments):
            self.close()
            raise RuntimeError("the process that tries grammars out does not start")
        return process


def _ask(process: subprocess.Popen[str], question: object) -> str:
    """The line that answers; empty if the process has ended, or does not answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    answers, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
    return process.stdout.readline() if answers else ""
