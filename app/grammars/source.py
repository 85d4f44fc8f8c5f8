"""From a client's grammar to the text that llguidance compiles."""

import json
from typing import assert_never

from llguidance import LLMatcher

from app.domain.grammar import Grammar, GrammarKind

JSON_WHITESPACE = r"[ \t]|\r?\n[ \t]{0,40}"
"""What may stand between two tokens of JSON: one space, or a line break with its indentation. llguidance's own default
has no limit, and small models repeat white space until their tokens run out."""


def source_of(grammar: Grammar) -> str:
    """Raises ValueError for a schema that is not JSON. Whether the rest is valid, compiling it shows."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(grammar.text, defaults={"whitespace_pattern": JSON_WHITESPACE})
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)
        case GrammarKind.CHOICE:
            # One terminal, so one automaton: as alternatives of a rule, 2,000 choices exceed the parser's limits.
            choices = " | ".join(json.dumps(choice) for choice in json.loads(grammar.text))
            return f"start: CHOICE\nCHOICE: {choices}"
        case _:
            assert_never(grammar.kind)
