"""Plans: dataclasses whose fields are the options of a command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field
from typing import Any

KEY = "option"


@dataclass(frozen=True, slots=True)
class Option:
    """What the command line says of a field. `quick` is its value with `--quick`; `flag` and `read` are those of the
    option where they do not follow from the field's name and default.
    """

    text: str
    quick: Any = MISSING
    flag: str = ""
    form: str = ""
    read: Callable[[str], Any] | None = None


def option(
    default: Any,
    text: str,
    *,
    quick: Any = MISSING,
    flag: str = "",
    form: str = "",
    read: Callable[[str], Any] | None = None,
) -> Any:
    """A field of a plan with that default, and an option for it that the command line describes by `text`."""
    return field(default=default, metadata={KEY: Option(text, quick, flag, form, read)})
