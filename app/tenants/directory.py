"""Finds the tenant of a key."""

import logging
from collections.abc import Callable, Iterable

from app.tenants.keys import digest
from app.tenants.tenant import Key, Role, Tenant

logger = logging.getLogger(__name__)


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
