"""The page of the flags of `djinn serve`, from its parser."""

import argparse

from app.flags import OneLineParser, add_flags
from docs.site.markdown import table

HEAD = """# Flags of `djinn serve`

Every flag of `djinn serve`, as its `--help` has it. `DJINN_<NAME>` sets the same from the environment, such as
`DJINN_PORT` for `--port`. A flag wins. [Operating](../operating.md) and [KV tiers](../tiers.md) explain the larger
ones.

"""


def flags_page() -> str:
    """The page: the parser's groups, a table for each."""
    parser = OneLineParser("djinn serve", add_help=False)
    add_flags(parser)
    sections = []
    for group in parser._action_groups:
        if group._group_actions:
            title = str(group.title)
            rows = table(("flag", "value", "meaning"), map(_row, group._group_actions))
            sections.append(f"## {title[0].upper()}{title[1:]}\n\n{rows}")
    return HEAD + "\n".join(sections)


def _row(action: argparse.Action) -> tuple[str, str, str]:
    flags = ", ".join(f"`{flag}`" for flag in action.option_strings)
    value = f"`{action.metavar}`" if action.metavar else ""
    return flags, value, (action.help or "").replace("%%", "%")
