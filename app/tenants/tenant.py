"""Tenants: their keys, roles and limits, and which of them a key belongs to."""

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from app.domain.values import NO_LIMITS, Limits

logger = logging.getLogger(__name__)


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


KEY_BYTES = 32
"""Random bytes of a new key."""


def new_key() -> str:
    """A key that cannot be guessed."""
    return f"djinn-{secrets.token_urlsafe(KEY_BYTES)}"


def digest(key: bytes) -> str:
    """The SHA-256 digest in hexadecimal, as a file of tenants has it. It cannot be turned back into the key."""
    return hashlib.sha256(key).hexdigest()


class Directory:
    """The tenants of one server, found by their keys. Without tenants the server asks for no key."""

    def __init__(self, tenants: Iterable[Tenant], clock: Callable[[], float]) -> None:
        """`clock` gives Unix seconds."""
        self._clock = clock
        self.replace(tenants)

    def replace(self, tenants: Iterable[Tenant]) -> None:
        """Have these tenants from now on."""
        self._by_name = {tenant.name: tenant for tenant in tenants}
        self._by_digest = {key.sha256: (tenant, key) for tenant in self._by_name.values() for key in tenant.keys}
        self._refused: set[str] = set()
        now = self._clock()
        for tenant in self._by_name.values():
            if not any(key.is_valid(now) for key in tenant.keys):
                logger.warning("tenant %s has no key that is valid now", tenant.name)

    def __bool__(self) -> bool:
        """Whether a key is needed."""
        return bool(self._by_name)

    def named(self, name: str | None) -> Tenant | None:
        """The tenant of that name."""
        return None if name is None else self._by_name.get(name)

    def find(self, key: bytes) -> Tenant | None:
        """The tenant of the key now; None: unknown.

        It compares digests, never keys. Even if the time reveals part of a digest, that does not reveal its key.
        """
        tenant, found = self._by_digest.get(digest(key), (None, None))
        if tenant is None or found is None:
            return None
        if not found.is_valid(now := self._clock()):
            self._note_refusal(tenant, found, "is not valid yet" if now < found.not_before else "has expired")
            return None
        return tenant

    def _note_refusal(self, tenant: Tenant, key: Key, why: str) -> None:
        """Log once for each key that a client uses it too late or too early."""
        if key.sha256 not in self._refused:
            self._refused.add(key.sha256)
            logger.warning("a key of tenant %s is refused: it %s", tenant.name, why)


def tenants_of_keys(keys: Iterable[str]) -> tuple[Tenant, ...]:
    """The tenants that the keys of `--api-keys` are, named by their order: a name tells nothing of its key. An only key
    is its server's operator.
    """
    digests = tuple(dict.fromkeys(digest(key.encode()) for key in keys))
    if len(digests) == 1:
        return (Tenant("default", (Key(digests[0]),), Role.OPERATOR),)
    return tuple(Tenant(f"key-{number}", (Key(each),), Role.USER) for number, each in enumerate(digests, 1))
