"""Clients that try to harm others, by name. Each goes on until it is cancelled, whatever the server answers."""

from benchmarks.fairness.attacks import connections, files, sessions, steering, text, turns
from benchmarks.fairness.attacks.base import Attack, Target

ATTACKS: dict[str, Attack] = {
    each.name: each
    for each in (
        *turns.ATTACKS,
        *steering.ATTACKS,
        *sessions.ATTACKS,
        *files.ATTACKS,
        *text.ATTACKS,
        *connections.ATTACKS,
    )
}

__all__ = ["ATTACKS", "Attack", "Target"]
