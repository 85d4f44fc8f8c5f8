"""`python -m app.gpu.ranks ORDERS OUT IN SLAB`: a rank, at the other ends of three sockets of rank 0.

It ends with rank 0, or with its own first error.
"""

import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from select import poll


def main() -> None:
    """Serve until rank 0 closes the sockets. Signals that end things are for the server."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    *descriptors, slab = map(int, sys.argv[1:])
    threading.Thread(target=_end_with, args=(descriptors[0],), name="djinn-orphan", daemon=True).start()
    from app.gpu.ranks.follower import follow  # imports PyTorch

    orders, out, back = (Connection(descriptor) for descriptor in descriptors)
    follow(orders, (out, back), slab)


def _end_with(descriptor: int) -> None:
    """End the process with the other end of a socket: it may be within a sum that rank 0 takes no part in."""
    hangup = poll()
    hangup.register(descriptor, 0)
    hangup.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
