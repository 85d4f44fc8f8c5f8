"""How large and how deep JSON texts are, told before they are parsed. No third-party imports.

Code that follows a text one level by level has room for few levels. Each value costs about a microsecond until it is
checked, and nothing else runs meanwhile.
"""

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


def _encode(text: str | bytes) -> bytes:
    return text.encode(errors="surrogatepass") if isinstance(text, str) else text


def _without_escapes(content: bytes) -> bytes:
    return content.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in content else content


def _outside_strings(content: bytes) -> bytes:
    """What is in no string. One that has no end reaches to the end of the text."""
    return b"".join(_without_escapes(content).split(b'"')[::2])
