"""The flags of `djinn ps`, `djinn top` and `djinn chat`. `client/shell/` does what they ask for."""

import argparse
from contextlib import suppress
from functools import partial
from typing import Any

from pydantic import ValidationError

from app.domain.values import SessionState, Tier
from app.flags import Commands, add_command

KEY = "An API key comes from DJINN_API_KEY: others can see arguments in the list of processes."
STATES = [state.value for state in SessionState if state is not SessionState.CLOSED]
SAMPLING = {"max_tokens": "COUNT", "temperature": "NUMBER", "seed": "NUMBER"}
"""Fields of a turn that `djinn chat` has flags for."""


def add_shell_commands(commands: Commands) -> None:
    """Add the three commands."""
    _add_ps(add_command(commands, "ps", "list the sessions of a server", _ps))
    showing = add_command(commands, "top", "show what a server does, each second", _top)
    _add_url(showing)
    showing.add_argument(
        "--count", type=_positive, metavar="COUNT", help="end after so many times (default: at Ctrl-C)"
    )
    _add_chat(add_command(commands, "chat", "talk in a session of a server, and stop it between two layers", _chat))


def _add_ps(parser: argparse.ArgumentParser) -> None:
    _add_url(parser)
    parser.add_argument("--state", choices=STATES, metavar="STATE", help=f"only those that are {_either(STATES)}")
    tiers = [tier.value for tier in Tier]
    parser.add_argument("--tier", choices=tiers, metavar="TIER", help=f"only those with their KV in {_either(tiers)}")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--watch", action="store_true", help="again each second, until Ctrl-C")
    form.add_argument("--json", action="store_true", help="all that the server says of them, for programs")


def _add_chat(parser: argparse.ArgumentParser) -> None:
    _add_url(parser)
    parser.add_argument(
        "session", nargs="?", metavar="SESSION", help="an id, or its end; it stays open (default: a new session)"
    )
    parser.add_argument("--keep", action="store_true", help="leave the new session open at the end")
    parser.add_argument("--raw", action="store_true", help="send lines as they are, without the chat template")
    for name, metavar in SAMPLING.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=partial(_field, name),
            metavar=metavar,
            help="as a turn has it (default: the server's)",
        )


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", metavar="URL", help="of the server (default: DJINN_BASE_URL, or else http://127.0.0.1:8000)"
    )
    parser.epilog = KEY


def _either(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"an integer from 1; got {text!r}")
    return int(text)


def _field(name: str, text: str) -> int | float:
    """The value of a field of a turn, within the field's range."""
    from app.web.errors import described  # half a second, which the other commands need not wait for
    from app.wire.turns import SamplingFields

    given: int | float | str = text
    with suppress(ValueError):
        given = int(text) if text.lstrip("+-").isdecimal() else float(text)
    try:
        value: int | float = getattr(SamplingFields.model_validate({name: given}), name)
    except ValidationError as error:
        raise argparse.ArgumentTypeError(next(described(SamplingFields, error))[1]) from error
    return value


def _ps(arguments: argparse.Namespace) -> int:
    from client.shell.ps import ps  # imports httpx and NumPy, as the others do: `djinn serve` needs not wait for them

    return ps(arguments.url, state=arguments.state, tier=arguments.tier, watch=arguments.watch, as_json=arguments.json)


def _top(arguments: argparse.Namespace) -> int:
    from client.shell.top import top

    return top(arguments.url, count=arguments.count)


def _chat(arguments: argparse.Namespace) -> int:
    from client.calls import TurnOptions
    from client.shell.chat.program import chat

    given: dict[str, Any] = {name: getattr(arguments, name) for name in SAMPLING}
    sampling: TurnOptions = {name: value for name, value in given.items() if value is not None}  # type: ignore[assignment]
    return chat(arguments.url, session=arguments.session, keep=arguments.keep, raw=arguments.raw, sampling=sampling)
