"""`python -m app.gpu.ranks ORDERS OUT IN SLAB`: a rank, at the other ends of three sockets of rank 0."""

import signal
import sys
import threading
from multiprocessing.connection import Connection

from app.gpu.ranks.ending import end_with, ending_with_it


def main() -> None:
    """Serve until rank 0 closes the sockets. Signals that end things are for the server."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    *descriptors, slab = map(int, sys.argv[1:])
    threading.Thread(target=end_with, args=(descriptors[0],), name="djinn-orphan", daemon=True).start()
    with ending_with_it():
        from app.gpu.ranks.follower import follow  # imports PyTorch

        orders, out, back = (Connection(descriptor) for descriptor in descriptors)
        follow(orders, (out, back), slab)


if __name__ == "__main__":
    main()
