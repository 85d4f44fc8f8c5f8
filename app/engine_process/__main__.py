"""`python -m app.engine_process FRAMES SOCKETS`: an engine at the other end of two socket pairs of a server."""

import os
import signal
import socket
import sys

from app.engine_process.channel import Channel, Closed
from app.engine_process.host import ORPHANED, serve


def main() -> int:
    """Serve one engine; returns the exit status. Signals that end things are for the server, which then says `Stop`."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    try:
        frames, sockets = (socket.socket(fileno=int(each)) for each in sys.argv[1:])
        return serve(Channel(frames), sockets)
    except Closed:
        return ORPHANED


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of libraries may still run, and none has anything left to say
