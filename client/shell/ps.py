"""`djinn ps`: the sessions of a server."""

import json
import time

from client._sync.client import Djinn
from client.models import SessionState, Tier
from client.shell.screen import make_console, refresh
from client.shell.server import on_server
from client.shell.session_table import Row, fitting_table, session_table


def ps(
    url: str | None, *, state: SessionState | None, tier: Tier | None, watch: bool = False, as_json: bool = False
) -> int:
    """List the sessions of the server at `url`, or those in a state and with their KV in a tier, oldest first.

    `watch`: again each second, until Ctrl-C, also after the server was away. `as_json`: what the server says of
    them, as one JSON array. Returns the exit status.
    """

    def rows(djinn: Djinn) -> list[Row]:
        now_s = time.time()
        return [Row(session.info, now_s) for session in djinn.sessions.list(state=state, tier=tier)]

    def command(djinn: Djinn) -> int:
        console = make_console()
        if as_json:
            found = [row.info.model_dump(mode="json", by_alias=True) for row in rows(djinn)]
            print(json.dumps(found, indent=2), flush=True)
        elif watch:
            refresh(console, lambda: fitting_table(rows(djinn), console, console.height), url)
        else:
            console.print(session_table(rows(djinn), console))
        return 0

    return on_server(url, command)
