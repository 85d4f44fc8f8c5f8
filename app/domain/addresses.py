"""Names and addresses of hosts."""

import re
from ipaddress import ip_address

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` is reached from this machine only. An unknown name counts as public."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_host_name(text: str) -> bool:
    """Whether it can be the name in a URL: a name or an address, without a scheme, a port or blanks."""
    try:
        ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return re.fullmatch(r"[A-Za-z0-9._-]+", text) is not None
    return True
