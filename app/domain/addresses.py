"""Addresses that only programs of this machine reach."""

from ipaddress import ip_address

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` is reached from this machine only. An unknown name counts as public."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
