"""The name under which the load generator asks for the stream's type."""

from client._async.turn import AsyncTurnStream

__all__ = ["AsyncTurnStream"]
