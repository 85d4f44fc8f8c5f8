"""Which cores threads run on: each that computes has one of its own, all others have any.

A scheduler that has seen an engine rest may put its threads on one core when work comes, and take 30 ms to part them:
measured for 65 tokens of a 135M Llama on two cores, four seconds after the last turn, 45 ms instead of 70. Linux gives
a new thread the cores of the one that starts it, so threads that a computing one starts have to let go.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

BOUND = {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}
"""OpenMP 5.0, section 6: its threads stay where they are, one on each core."""
CHOSEN = (*BOUND, "OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Who sets one of them has chosen where threads run, or fewer than cores, which other servers would not know of."""


_all = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
_own = _all


def binding(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for a process that computes on all cores; none if `environment` has chosen otherwise."""
    return {} if any(name in environment for name in CHOSEN) else BOUND


def without_binding(environment: Mapping[str, str]) -> dict[str, str]:
    """The `environment` for a process that computes beside this one: not bound to the same cores."""
    return {name: value for name, value in environment.items() if BOUND.get(name) != value}


def free_from_core() -> None:
    """Let the calling thread run on all cores that the process had when this module was imported."""
    if _own != _all:
        os.sched_setaffinity(0, _all)


def leave_core() -> None:
    """Note the core that OpenMP has given the calling thread, if it has, and let go of it until `take_core`."""
    global _own
    if hasattr(os, "sched_getaffinity"):
        _own = frozenset(os.sched_getaffinity(0))
        free_from_core()


def take_core() -> None:
    """Have the calling thread stay on the core that `leave_core` has noted."""
    if _own != _all:
        os.sched_setaffinity(0, _own)
