"""How long the end of a server may take: what an orchestrator must wait before it kills."""

from app.engine_process.child import END_TIMEOUT_S
from app.engine_process.engine import STOP_TIMEOUT_S
from app.journal.journal import CLOSE_S as JOURNAL_S
from app.sessions.kept_kv import LATE_S
from app.sessions.lifecycle import KEEP_S
from app.traces.base import CLOSE_S as TRACES_S

ANSWERS_S = 5
"""How long responses of turns that were cancelled at the end may take to reach their clients."""


def longest_end_s(drain_timeout_s: float) -> float:
    """The seconds from SIGTERM to the end of the process, if each step takes all the time that it has."""
    kv = KEEP_S + LATE_S  # turns that do not end when they are cancelled have this time too
    engine = STOP_TIMEOUT_S + END_TIMEOUT_S
    return drain_timeout_s + kv + ANSWERS_S + engine + JOURNAL_S + TRACES_S
