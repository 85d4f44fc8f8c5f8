"""`djinn ps`: the sessions of a server."""

import json
import time

from rich.console import Group, RenderableType
from rich.text import Text

from client._sync.client import Djinn
from client.models import SessionState, Tier
from client.shell.screen import make_console, refresh
from client.shell.server import on_server
from client.shell.session_table import Row, fitting_table, session_table
from client.shell.wording import on_one_line


def ps(
    url: str | None, *, state: SessionState | None, tier: Tier | None, watch: bool = False, as_json: bool = False
) -> int:
    """List the sessions of the server at `url`, or those in a state and with their KV in a tier, oldest first, below a
    line for each replica of its cluster that is away: the list lacks that one's sessions.

    `watch`: again each second, until Ctrl-C, also after the server was away. `as_json`: what the server says of
    them, as one JSON array. Returns the exit status.
    """

    def rows(djinn: Djinn) -> list[Row]:
        now_s = time.time()
        return [Row(session.info, now_s) for session in djinn.sessions.list(state=state, tier=tier)]

    def drawn(djinn: Djinn) -> RenderableType:
        told = [on_one_line(each.text) for each in djinn.findings().data if each.kind == "replica"]
        lines, found = [Text(f"! {text}", style="red") for text in told], rows(djinn)
        table = fitting_table(found, console, console.height - len(lines)) if watch else session_table(found, console)
        return Group(*lines, table)

    console = make_console()

    def command(djinn: Djinn) -> int:
        if as_json:
            found = [row.info.model_dump(mode="json", by_alias=True) for row in rows(djinn)]
            print(json.dumps(found, indent=2), flush=True)
        elif watch:
            refresh(console, lambda: drawn(djinn), url)
        else:
            console.print(drawn(djinn))
        return 0

    return on_server(url, command)
