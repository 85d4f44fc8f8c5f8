"""Which errors a fault explains."""

from __future__ import annotations

import pytest

from client.errors import ConnectionLost, DjinnError, NotFound, RateLimited, ServerError, Timeout
from loadgen.experiments.soak.findings import Findings
from loadgen.experiments.soak.notes import Notes

EXPLAINED = [
    ConnectionLost("gone"),
    RateLimited("full", status=429, code="queue_full"),
    ServerError("dead", status=503, code="engine_restarting"),
    ServerError("full", code="not_durable"),
]
NEVER = [
    ServerError("a bug", status=500, code="internal_error", request_id="request-1"),
    NotFound("gone", status=404, code="not_found"),
    Timeout("silent"),
]


def named(error: DjinnError) -> str:
    return type(error).__name__


@pytest.mark.parametrize("error", EXPLAINED, ids=named)
def test_an_error_is_expected_only_while_a_fault_lasts(error: DjinnError) -> None:
    findings = Findings()
    notes = Notes(findings)
    notes.failed("agent-0", "turn", notes.seconds, error)
    assert len(findings.unexpected) == 1
    sent_s = notes.seconds
    with notes.disturbed("kill of the engine"):
        notes.failed("agent-0", "turn", notes.seconds, error)
    notes.failed("agent-0", "turn", sent_s, error)
    assert len(findings.unexpected) == 1
    assert sum(findings.expected.values()) == 2


@pytest.mark.parametrize("error", NEVER, ids=named)
def test_no_fault_explains_a_bug(error: DjinnError) -> None:
    findings = Findings()
    notes = Notes(findings)
    with notes.disturbed("kill of the engine"):
        notes.failed("agent-0", "turn", notes.seconds, error)
    (told,) = findings.unexpected
    assert (told.kind, told.message, told.request_id) == (named(error), error.message, error.request_id)


def test_an_answer_that_differs_is_written_down() -> None:
    findings = Findings()
    notes = Notes(findings)
    notes.compared("agent-0", (1, 2), (1, 2), tokens=2, position=5)
    assert not findings.wrong
    notes.compared("agent-0", (1, 2), (1, 3), tokens=2, position=7)
    (wrong,) = findings.wrong
    assert (wrong.position, wrong.made, wrong.expected) == (7, (1, 2), (1, 3))
    assert (findings.answers, findings.tokens) == (2, 4)
