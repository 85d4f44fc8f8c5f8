"""How an experiment goes, live."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

REFRESHES_PER_S = 4
"""Few, because drawing takes time from the clock that measures."""


@contextmanager
def show_parts(console: Console, target: str, parts: Mapping[str, int]) -> Iterator[Callable[[str], None]]:
    """Show how far each part of an experiment is, of its number of steps; yields what is to be called after a step.

    Where `console` is not a terminal, a line tells of each part that is complete.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, refresh_per_second=REFRESHES_PER_S, disable=not console.is_terminal
    ) as progress:
        tasks = {
            name: progress.add_task(f"{target}: {name}", total=steps, start=False) for name, steps in parts.items()
        }
        left = dict(parts)

        def advance(part: str) -> None:
            progress.start_task(tasks[part])
            progress.advance(tasks[part])
            left[part] -= 1
            if not left[part] and not console.is_terminal:
                console.print(f"{target}: {part} done")

        yield advance
