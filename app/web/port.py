"""The port that a server listens on, held before anything slow is done."""

import errno
import socket

from app.domain.errors import FieldOutOfRange


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the port but does not listen yet. Raises `FieldOutOfRange` if the port cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where the protocol is named; with it on, an answer of two writes waits
    # 40 ms for the client's delayed acknowledgement.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        # Other sockets that may reuse the address could bind it too until this one listens.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        bound.close()
        setting = "port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "host"
        raise FieldOutOfRange(
            f"cannot listen on {host}, port {port}: {error.strerror}; choose another with --{setting}", param=setting
        ) from error
    return bound
