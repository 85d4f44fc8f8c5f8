"""A scene in which the server is lost has an outcome too."""

from __future__ import annotations

from benchmarks.fairness.runner import _computed
from loadgen.processes.process import free_port


async def test_a_server_that_does_not_answer_has_no_count_of_tokens() -> None:
    assert await _computed(f"http://127.0.0.1:{free_port()}") is None
