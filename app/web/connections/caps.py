"""How many connections clients may have, in all and from one address."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

from app.domain.errors import FieldOutOfRange
from app.settings import Settings

MOST = 8192
"""Connections that a server has room for unless it is told otherwise: two for each session."""
OWN_SHARE = 4
"""One descriptor of so many is for files that the server opens itself."""
ADDRESS_SHARE = 2
"""One address has one connection of so many, unless the server is told otherwise."""

LOOPBACK = "loopback"
"""The origin of everything that runs on the server's own machine."""


@dataclass(frozen=True, slots=True)
class Caps:
    """How many connections may be open at once: all of them, those of one origin, those of `LOOPBACK`."""

    total: int
    per_origin: int
    loopback: int

    @classmethod
    def of(cls, settings: Settings, descriptors: int) -> Caps:
        """What the settings ask for, in a process with that limit of open descriptors.

        Raises `FieldOutOfRange` for more connections than the limit leaves room for.
        """
        room = descriptors - descriptors // OWN_SHARE
        total = min(MOST, room) if settings.max_connections is None else settings.max_connections
        if total > room:
            raise FieldOutOfRange(
                f"max_connections must be at most {room}: the limit of open files (ulimit -n) is {descriptors}, and "
                "the server needs a quarter of them itself",
                param="max_connections",
            )
        if settings.max_connections_per_address is not None:
            return cls(total, settings.max_connections_per_address, settings.max_connections_per_address)
        return cls(total, max(1, total // ADDRESS_SHARE), total)

    def of_origin(self, origin: str) -> int:
        """How many the origin may have."""
        return self.loopback if origin == LOOPBACK else self.per_origin


def origin_of(peer: str) -> str:
    """What counts as one address: an IPv4 address, an IPv6 network of 64 bits, which one host has to itself, or
    `LOOPBACK`.
    """
    address: IPv4Address | IPv6Address = ip_address(peer)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_loopback:
        return LOOPBACK
    if isinstance(address, IPv4Address):
        return str(address)
    return str(IPv6Network((int(address), 64), strict=False))
