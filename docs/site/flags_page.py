"""The page of the flags of `djinn serve`, from its parser."""

from app.flags import OneLineParser, add_flags
from docs.site.options import options_table

HEAD = """# Flags of `djinn serve`

Every flag of `djinn serve`, as its `--help` has it. `DJINN_<NAME>` sets the same from the environment, such as
`DJINN_PORT` for `--port`. A flag wins. [Operating](../operating.md), [limits](limits.md) and [KV tiers](../tiers.md)
explain the larger ones.

"""


def flags_page() -> str:
    """The page: the parser's groups, a table for each."""
    parser = OneLineParser("djinn serve", add_help=False)
    add_flags(parser)
    sections = []
    for group in parser._action_groups:
        if group._group_actions:
            title = str(group.title)
            sections.append(f"## {title[0].upper()}{title[1:]}\n\n{options_table(group._group_actions)}")
    return HEAD + "\n".join(sections)
