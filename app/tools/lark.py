"""Grammars of texts as regular expressions of JSON strings: models write a tool's input inside quotation marks."""

import ast
import json
import re
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter

_TOKEN = re.compile(
    r"""(?://|\#)[^\n]*|->\s*\w+
    |(?P<text>"(?:[^"\\\n]|\\.)*")(?P<case>i?)
    |(?P<regex>/(?:[^/\\\n]|\\.)+/)(?P<flags>[a-z]*)
    |(?P<rule>^[ \t]*[?!]*(?P<defined>[A-Za-z_]\w*)(?:\.-?\d+)?[ \t]*:)
    |(?P<name>[A-Za-z_]\w*)
    |%import\s+common\.(?P<known>\w+)(?:\s*->\s*(?P<alias>\w+))?
    |(?P<foreign>%\w+|<[^<>\s]*>)
    |(?P<unclosed>["/](?:[^\\\n]|\\.)*)""",
    re.VERBOSE | re.MULTILINE,
)
_COMMON = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "DIGIT": "[0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "NUMBER": r"[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
}
"""Terminals of Lark's library."""

_ESCAPED = {each: re.escape(json.dumps(each)[1:-1]) for each in '"\\\n\r\t\b\f'}
"""Characters as a JSON string has them, in a regular expression."""
_PLAIN = r'[^"\\\x00-\x1f]'
_ATOM = re.compile(
    r"\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*(?:\]|\\?\Z)|\\(?:x\{?[0-9a-fA-F]+\}?|[pP]\{\^?\w+\}|.)|[.\"]", re.DOTALL
)
_ASSERTIONS = frozenset({r"\b", r"\B", r"\A", r"\z", r"\Z"})

PREFIX = "\0"
"""Begins the names in a grammar of `quoted_lark`, for its reader to replace."""
START = f"{PREFIX}R_START"


class NotRegular(ValueError):
    """The grammar has what no regular expression has, or what no text has."""


def quoted_lark(source: str) -> str:
    """Terminals of which `START` matches the texts of the Lark grammar `source`, as they stand in a JSON string.

    A rule cannot end where one of its texts goes on with the same character: so each rule is a part of one expression.
    Raises `NotRegular` for rules that refer to themselves, and for schemas, special tokens and ignored text.
    """
    return _terminals(source, lambda text: json.dumps(text, ensure_ascii=False)[1:-1], _quoted_regex)


def plain_lark(source: str) -> str:
    """The same for texts that stand as they are, in families whose arguments are no JSON."""
    return _terminals(source, lambda text: text, lambda regex, flags: regex)


def _terminals(source: str, text_of: Callable[[str], str], regex_of: Callable[[str, str], str]) -> str:
    rules: dict[str, set[str]] = {}
    last = ""

    def write(token: re.Match[str]) -> str:
        nonlocal last
        if token["text"]:
            try:
                text = str(ast.literal_eval(token["text"]))
            except (SyntaxError, ValueError):
                raise NotRegular(f"{token['text'][:64]} is no text") from None
            return json.dumps(text_of(text), ensure_ascii=False) + token["case"]
        if token["regex"]:
            return f"/{regex_of(token['regex'][1:-1], token['flags'])}/{token['flags']}"
        if token["rule"]:
            last = _terminal(token["defined"])
            rules.setdefault(last, set())
            return f"{PREFIX}{last}:"
        if token["name"]:
            rules.setdefault(last, set()).add(_terminal(token["name"]))
            return PREFIX + _terminal(token["name"])
        if token["known"] in _COMMON:
            name = _terminal(token["alias"] or token["known"])
            return f"{PREFIX}{name}: /{regex_of(_COMMON[token['known']], '')}/"
        if token["known"] or token["foreign"]:
            raise NotRegular(f"{token[0][:64]!r} has no place in the text of a tool's input")
        return token["unclosed"] or ""  # which its compilation tells

    written = _TOKEN.sub(write, source)
    try:
        TopologicalSorter(rules).prepare()
    except CycleError:
        raise NotRegular("a rule refers to itself") from None
    return written


def quoted_regex(regex: str) -> str:
    """A terminal `START` that matches what the whole of `regex` does, as it stands in a JSON string."""
    return plain_regex(_quoted_regex(regex, ""))


def plain_regex(regex: str) -> str:
    """The same for a text that stands as it is."""
    slashes = re.sub(r"\\.|/", lambda each: r"\/" if each[0] == "/" else each[0], regex)
    return f"{START}: /{slashes}/"


def _terminal(name: str) -> str:
    return name if name.isupper() else f"R_{name.upper()}"


def _quoted_regex(regex: str, flags: str) -> str:
    has_lines = "s" in flags or "(?s" in regex
    return _ATOM.sub(lambda atom: _quoted_atom(atom[0], has_lines=has_lines), regex)


def _quoted_atom(atom: str, *, has_lines: bool) -> str:
    """One character, or one of a class of them, in JSON."""
    if atom in _ASSERTIONS:
        return atom
    try:
        matches = re.compile(atom, re.DOTALL if has_lines else 0).fullmatch
        escaped = [text for character, text in _ESCAPED.items() if matches(character)]
    except re.error:  # a class that only llguidance knows: without these characters
        escaped = []
    if atom != "." and not escaped and atom[0] != "[" and atom[:2] not in (r"\p", r"\P"):
        return atom
    if atom == '"' or (atom[0] == "\\" and len(escaped) == 1 and atom[1] not in "sSwWdDpP"):
        return f"(?:{escaped[0]})"
    plain = _PLAIN if atom == "." else f"[{atom}&&{_PLAIN}]"
    return f"(?:{'|'.join([plain, *escaped])})"
