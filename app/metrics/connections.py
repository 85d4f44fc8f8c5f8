"""Prometheus metrics of clients' connections."""

from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Gauge


class Refused(StrEnum):
    """Why a connection was not taken."""

    ADDRESS = "address"
    """Its address has as many as it may."""
    TOTAL = "total"
    """All addresses together have as many as they may."""
    SYSTEM = "system"
    """The operating system could not give it to the server, for lack of descriptors or memory."""


class Ended(StrEnum):
    """Why the server ended a connection that it had taken."""

    HEADER = "header"
    """The rest of a header did not come."""
    BODY = "body"
    """The rest of a body did not come."""
    UNREAD = "unread"
    """The client did not read its answer."""
    GAVE_WAY = "gave_way"
    """It had no request under way, and another needed the room."""


class ConnectionMetrics:
    """Connections of one server, in the given registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.open = Gauge("djinn_connections", "Open connections of clients", registry=registry)
        self._refused = Counter(
            "djinn_connections_refused", "Connections that were not taken", ["cause"], registry=registry
        )
        self._ended = Counter(
            "djinn_connections_ended", "Connections that the server ended", ["cause"], registry=registry
        )
        # A series that begins with its first event has no rate of it.
        for refused in Refused:
            self._refused.labels(refused.value)
        for ended in Ended:
            self._ended.labels(ended.value)

    def count_refused(self, cause: Refused) -> None:
        """Count one that was not taken."""
        self._refused.labels(cause.value).inc()

    def count_ended(self, cause: Ended) -> None:
        """Count one that the server ended."""
        self._ended.labels(cause.value).inc()
