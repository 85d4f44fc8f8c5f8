"""Names and addresses of hosts."""

import re
from ipaddress import ip_address

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
ANY_HOST, PRIVATE_HOSTS = "*", "<private>"
"""What stands in a list of hosts for any, and for those of `is_private_name`."""
PRIVATE_ZONES = (".internal", ".local", ".localhost", ".home.arpa")
"""Zones of private networks: ICANN's resolution of 2024-07-29, RFC 6762, 6761 and 8375."""


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` is reached from this machine only. An unknown name counts as public."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_private_name(name: str) -> bool:
    """Whether no site of the Internet can have it: an address, a name without a dot, or one of a private zone.

    A page can have its own name point to any address (DNS rebinding). Its requests then have that name as `Host`.
    """
    try:
        ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(PRIVATE_ZONES)
    return True


def is_host_name(text: str) -> bool:
    """Whether it can be the name in a URL: a name or an address, without a scheme, a port or blanks."""
    try:
        ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return re.fullmatch(r"[A-Za-z0-9._-]+", text) is not None
    return True


def is_origin(text: str) -> bool:
    """Whether a browser can send it as `Origin`: a scheme and a host in small letters, and a port unless it is the
    scheme's own.
    """
    found = re.fullmatch(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?", text)
    return found is not None and found[3] not in {"http": ("80",), "https": ("443",)}.get(found[1], ())
