"""The page of the options of the load generator, from its parser."""

import argparse
from collections.abc import Iterator

from docs.site.options import options_table
from loadgen.cli import COMMANDS, make_parser

HEAD = """# Options of the load generator

Every option of `python -m loadgen COMMAND`, as its `--help` has it. [Measure servers](../loadgen.md) is the guide, and
[experiments](experiments.md) says what each command measures.

"""


def loadgen_page() -> str:
    """The page: a section for each command, a table for each group of its options."""
    sections = []
    for name, parser in _commands(make_parser()):
        text = COMMANDS[name][1]
        sections.append(f"## `{name}`\n\n{text[0].upper()}{text[1:]}.\n\n" + "\n".join(_tables(parser)))
    return HEAD + "\n".join(sections)


def _tables(parser: argparse.ArgumentParser) -> Iterator[str]:
    """The tables of a command, and after them those of its actions."""
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if not isinstance(action, argparse._SubParsersAction)]
        if any(action.option_strings and action.dest != "help" for action in actions):
            title = str(group.title)
            head = "" if title == "options" else f"{title[0].upper()}{title[1:]}:\n\n"
            yield head + options_table(action for action in actions if action.option_strings)
    for name, action in _commands(parser):
        for found in _tables(action):
            yield f"Options of `{name}`:\n\n{found}"


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()
