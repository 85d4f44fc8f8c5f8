"""One tenant: its keys, its role, its limits."""

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from app.domain.limits import NO_LIMITS, Limits


class Role(StrEnum):
    """What a tenant may see: its own, that of all tenants, or only the server's health and figures."""

    USER = "user"
    OPERATOR = "operator"
    METRICS = "metrics"


@dataclass(frozen=True, slots=True)
class Key:
    """One key, known by its SHA-256 digest. It is valid from `not_before` to `not_after`, in Unix seconds."""

    sha256: str
    not_before: float = -inf
    not_after: float = inf

    def is_valid(self, now: float) -> bool:
        """Whether the key may be used at `now`."""
        return self.not_before <= now < self.not_after


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant. Its name owns its sessions, so that they outlive its keys."""

    name: str
    keys: tuple[Key, ...]
    role: Role = Role.USER
    limits: Limits = NO_LIMITS
