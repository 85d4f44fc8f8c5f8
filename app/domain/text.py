"""Texts and addresses of clients, looked at before they are parsed or used.

Code that follows a text one level by level has room for few levels. Each value costs about a microsecond until it is
checked, and nothing else runs meanwhile.
"""

import re
from ipaddress import ip_address

MAX_NESTING = 100
"""Levels that a JSON text may have: no body of the API needs as many."""
_STRUCTURE = b"[]{},"
_NO_STRUCTURE = bytes(set(range(256)) - set(_STRUCTURE))
_ONE_KIND = bytes.maketrans(b"{}", b"[]")
_QUOTES_OF_A_VALUE = 4
"""Those of its name and its own."""


def is_nested_too_deep(text: str | bytes) -> bool:
    """Whether lists and objects stand in each other more than `MAX_NESTING` deep. The text need not be valid JSON."""
    content = _encode(text)
    if content.count(b"[") + content.count(b"{") <= MAX_NESTING:
        return False
    brackets = _outside_strings(content).translate(_ONE_KIND, _NO_STRUCTURE + b",")
    # A parser comes no further: there it has closed all, or more. A text could have millions that close nothing.
    brackets = brackets[: 2 * brackets.count(b"[")]
    for _ in range(MAX_NESTING):
        before = len(brackets)
        brackets = brackets.replace(b"[]", b"")  # the innermost level
        if len(brackets) == before:
            break
    return b"[]" in brackets or brackets.count(b"[") > MAX_NESTING


def has_more_values(text: str | bytes, most: int) -> bool:
    """Whether the text has more than `most` values, lists and objects included. An empty one counts twice.

    The text need not be valid JSON.
    """
    content = _encode(text)
    if sum(map(content.count, (b"[", b"{", b","))) < most:
        return False
    content = _without_escapes(content)
    if content.count(b'"') > _QUOTES_OF_A_VALUE * most:
        return True
    return sum(map(_outside_strings(content).count, (b"[", b"{", b","))) >= most


_HEX = "[0-9a-fA-F]"
_ESCAPE = re.compile(
    rf"""\\(?:
    (?P<open>(?:u[dD][89abAB]{_HEX}{{2}}(?:\\(?:u{_HEX}{{0,3}})?)?|u{_HEX}{{0,3}})?\Z)
    |u[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}
    |(?P<half>u[dD][89a-fA-F]{_HEX}{{2}})
    |.)""",
    re.DOTALL | re.VERBOSE,
)


def whole_escapes(text: str) -> tuple[str, str]:
    """A JSON text in which U+FFFD stands for escapes that are half of a surrogate pair, and what of its end is an
    escape, or half of a pair, that more text may end. The text begins with no part of an escape.
    """
    rest = ""

    def write(found: re.Match[str]) -> str:
        nonlocal rest
        if found["open"] is not None:
            rest = found[0]
            return ""
        return "\\ufffd" if found["half"] else found[0]

    return _ESCAPE.sub(write, text), rest


def whole_characters(text: str) -> str:
    """A JSON text in which U+FFFD stands for each half of a surrogate pair, as a character or an escape."""
    if not text.isascii():
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return "".join(whole_escapes(text)) if "\\ud" in text or "\\uD" in text else text


def _encode(text: str | bytes) -> bytes:
    return text.encode(errors="surrogatepass") if isinstance(text, str) else text


def _without_escapes(content: bytes) -> bytes:
    return content.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in content else content


def _outside_strings(content: bytes) -> bytes:
    """What is in no string. One that has no end reaches to the end of the text."""
    return b"".join(_without_escapes(content).split(b'"')[::2])


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


MODEL_NAME = "1 to 256 printable characters, without spaces, commas and ="


def is_model_name(text: str) -> bool:
    """Whether a served model may have that name: `MODEL_NAME`."""
    return 0 < len(text) <= 256 and text.isprintable() and not set(text) & set(" ,=")


def is_origin(text: str) -> bool:
    """Whether a browser can send it as `Origin`: a scheme and a host in small letters, and a port unless it is the
    scheme's own.
    """
    found = re.fullmatch(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?", text)
    return found is not None and found[3] not in {"http": ("80",), "https": ("443",)}.get(found[1], ())


def header_text(value: str) -> str:
    """What a client has written in a header. Starlette reads each byte as ISO 8859-1; where they are valid UTF-8, they
    are read so, as RFC 9110 (5.5) leaves bytes beyond ASCII to who receives them.
    """
    try:
        return value.encode("latin-1").decode()
    except UnicodeDecodeError:
        return value
