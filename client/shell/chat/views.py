"""What the commands of a conversation show."""

import math
from collections.abc import Iterator, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from client.breakpoint_models import BreakpointInfo, CheckpointInfo, Lens
from client.models import History, Turn
from client.shell.session_table import GAP
from client.shell.wording import counted, harmless, visible

MARKS = "<think>", "</think>"
"""What begins a thought, and what ends it."""


def history_lines(history: History) -> Iterator[tuple[int, str]]:
    """The lines of a history that has its pieces, each with the position of the token in which it begins."""
    first: int | None = None
    line = ""
    for position, piece in enumerate(history.pieces or ()):
        if first is None:
            first = position
        *whole, line = (line + piece).split("\n")
        for text in whole:
            yield first, text
            first = position
        if whole and not line:
            first = None
    if first is not None:
        yield first, line


def history_text(history: History) -> str:
    """Those lines for a terminal: a position is what `/rewind` takes."""
    return "\n".join(f"{first:>7}  {harmless(line)}" for first, line in history_lines(history))


def lens_view(lens: Lens) -> Group:
    """The likeliest next tokens at the last position."""
    place = lens.positions[-1]
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("NEXT", no_wrap=True, overflow="ellipsis")
    table.add_column("PROBABILITY", justify="right", no_wrap=True)
    for guess in place.top:
        probability = "-" if guess.logprob is None else f"{math.exp(guess.logprob):.2%}"
        table.add_row(Text(visible(guess.text)), probability)
    title = f"after layer {lens.layer}, at position {place.position}, token {visible(place.text)}"
    return Group(Text(title, no_wrap=True, overflow="ellipsis"), table)


def breakpoints_text(found: list[BreakpointInfo]) -> str:
    """What is armed, a line for each."""
    return "\n".join(
        f"{each.action} {_place(each.point, each.layers)}, pass {each.when.in_pass}" + (", once" if each.once else "")
        for each in found
    )


def edits_text(found: list[BreakpointInfo]) -> str:
    """What steers, a line for each edit."""
    return "\n".join(
        " ".join(
            [
                edit.op,
                *([] if edit.factor is None else [f"{edit.factor:g}"]),
                *([] if edit.vector is None else [f"x a vector of length {edit.vector.norm:.2f}"]),
                _place(each.point, each.layers),
            ]
        )
        for each in found
        for edit in each.edits
    )


class Thoughts:
    """Tells what a model thinks, between `<think>` and `</think>`, from its answer, as both come."""

    def __init__(self) -> None:
        self._inside = False
        self._rest = ""
        """What may be the beginning of a mark."""

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """The next parts without the marks, each with whether it is thought."""
        text = self._rest + text
        while (mark := MARKS[self._inside]) in text:
            before, _, text = text.partition(mark)
            yield before, self._inside
            self._inside = not self._inside
        begun = next((count for count in range(len(mark) - 1, 0, -1) if text.endswith(mark[:count])), 0)
        self._rest = text[len(text) - begun :]
        yield text.removesuffix(self._rest), self._inside

    def end(self) -> tuple[str, bool]:
        """What is left: it was no mark."""
        return self._rest, self._inside


def end_of_turn(turn: Turn) -> str:
    """Why a turn is over, and how long the history is now."""
    usage = turn.usage
    total = counted(usage.prompt_tokens + usage.completion_tokens, "token")
    return f"({turn.finish_reason}; {total}, {usage.cached_tokens} of {usage.prompt_tokens} came from the KV cache)"


def place_of(checkpoint: CheckpointInfo) -> str:
    """Where a turn is paused."""
    positions = f"positions {checkpoint.first} to {checkpoint.end - 1}"
    if checkpoint.end - checkpoint.first == 1:
        positions = f"position {checkpoint.first}"
    place = _place(checkpoint.point, [checkpoint.layer])
    return f"(paused {place}, {positions}, pass {checkpoint.in_pass})"


def _place(point: str, layers: Sequence[int]) -> str:
    shown = ", ".join(map(str, layers))
    return f"after layer {shown}" if point == "resid_post" else f"at {point} of layer {shown}"
