"""The depth of JSON texts: code that follows one level by level has room for few levels. No third-party imports."""

import re

MAX_NESTING = 100
"""Levels that a JSON text may have: no body of the API needs as many."""
# A string that has no end reaches to the end of the text: each byte is read once, whatever is sent.
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)


def is_nested_too_deep(text: str | bytes) -> bool:
    """Whether lists and objects stand in each other more than `MAX_NESTING` deep. The text need not be valid JSON."""
    content = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if content.count(b"[") + content.count(b"{") <= MAX_NESTING:
        return False
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(content):
        first = found[0][:1]
        depth += (first in b"[{") - (first in b"]}")
        if depth > MAX_NESTING:
            return True
    return False
