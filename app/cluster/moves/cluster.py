"""One server as a part of a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from app.cluster.moves.arriving.arrivals import Arrivals
from app.cluster.moves.bindings import Bindings
from app.cluster.moves.calls import PeerCalls
from app.cluster.moves.key import ClusterKey
from app.cluster.moves.leaving.balance import Balance
from app.cluster.moves.leaving.departures import Departures
from app.cluster.moves.leaving.draining import Draining
from app.cluster.moves.outlook import Outlook
from app.cluster.moves.peers import Peers
from app.domain.errors import FieldOutOfRange
from app.sessions.registry import SessionRegistry
from app.settings import Settings
from app.tenants.tenant import Directory


@dataclass(frozen=True, slots=True)
class Membership:
    """What makes a server one of a cluster: its own name, the others, and the key that they share."""

    here: str
    peers: Peers
    key: ClusterKey
    host: str | None
    """A name that the server answers to, and so do the others; None: they answer to any."""

    @classmethod
    def read(cls, settings: Settings) -> Membership | None:
        """That of the settings' files; None: the server is in no cluster. Raises `FieldOutOfRange` for a file that
        cannot be used.
        """
        if settings.replica is None or settings.peers is None or settings.cluster_key_file is None:
            return None
        key, peers = ClusterKey.read(settings.cluster_key_file.expanduser()), Peers(settings.peers.expanduser())
        if peers.find(settings.replica) is None:
            raise FieldOutOfRange(
                f"replica: {settings.replica} is none of the servers in {settings.peers}, so no other could give it a "
                f"session: they are {', '.join(peers.urls)}",
                param="replica",
            )
        return cls(settings.replica, peers, key, settings.known_host)


class Cluster:
    """Sends sessions to other servers, and takes those that they send. Used on the event loop only."""

    def __init__(self, registry: SessionRegistry, directory: Directory, member: Membership, bindings: Bindings) -> None:
        self.member = member
        self.arrivals = Arrivals(registry, directory, bindings)
        self.departures = Departures(registry, member.here, member.peers, PeerCalls(member.key), bindings)
        outlook = Outlook(member.here, member.peers, member.host, member.key)
        self.draining = Draining(registry, self.departures, outlook)
        self.balance = Balance(registry, self.departures, outlook)
        registry.table.require_home = self.departures.require_home

    def start(self) -> None:
        """Ask after sessions that were leaving when the server ended. Call when all sessions are open."""
        self.departures.settle_all()

    def reload(self) -> None:
        """Read the peers again."""
        self.member.peers.reload()

    async def close(self) -> None:
        """Stop what is under way."""
        await self.departures.close()
        await self.arrivals.close()
