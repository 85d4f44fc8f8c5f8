"""How much memory this process may lock, and whether pinning is held to it."""

import resource
from dataclasses import dataclass

from app.doctor.findings import Finding, error, ok, warning
from app.machine.units import size

MEMLOCK = "memlock"
PINNED = "pinned_memory"
RAISE_LIMIT = "ulimit -l unlimited (docker run --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)"


@dataclass(frozen=True, slots=True)
class Pinned:
    """An attempt to pin `bytes` of host memory. problem: why it failed, None if it did not."""

    bytes: int
    problem: str | None


def read_memlock() -> int | None:
    """`ulimit -l` in bytes; None: unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def check_memlock(limit: int | None, pinned: Pinned | None, host_total: int) -> Finding:
    """`pinned`: None where nothing is pinned. `host_total`: bytes of memory in the machine.

    NVIDIA's driver usually locks pages without a look at this limit; a sandbox may look. Only an attempt at more than
    the limit tells.
    """
    if limit is None or limit >= host_total:
        return ok(MEMLOCK, "unlimited" if limit is None else size(limit))
    if pinned is None:
        return ok(MEMLOCK, f"{size(limit)}; nothing is to be pinned")
    if pinned.problem is None and pinned.bytes > limit:
        return ok(MEMLOCK, f"{size(limit)}, which the driver does not count pinned memory against")
    return warning(MEMLOCK, f"{size(limit)}; more host memory for KV may not be pinned", RAISE_LIMIT)


def check_pinned(pinned: Pinned) -> Finding:
    """Whether host memory could be pinned at all."""
    if pinned.problem is None:
        return ok(PINNED, f"{size(pinned.bytes)} allocated")
    return error(
        PINNED, f"{size(pinned.bytes)} could not be allocated: {pinned.problem}", f"free memory; {RAISE_LIMIT}"
    )
