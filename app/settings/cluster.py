"""Settings of a server among others."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, Field, field_validator

from app.domain.homes import REPLICA_NAME
from app.settings.values import none_or_path

CLUSTER_LEASE_S = 15.0
"""A server that is cut off from its folder answers for so long at most, and another one waits a little longer."""


class ClusterSettings(BaseModel):
    """The server's name, its peers, and what it does for them."""

    replica: str | None = Field(
        None,
        description="name of this server in its cluster, at most 16 of a-z and 0-9, a letter first; part of its "
        "sessions' ids (default: none)",
    )
    peers: Annotated[Path | None, BeforeValidator(none_or_path)] = Field(
        None,
        description="YAML or JSON file with the name and the URL of each server of the cluster; SIGHUP reads it again "
        "(default: none)",
    )
    cluster_key_file: Annotated[Path | None, BeforeValidator(none_or_path)] = Field(
        None, description="file with the secret that the servers of the cluster share, at least 32 characters"
    )
    lease_s: float | None = Field(
        None,
        description="how long the server may serve sessions without writing to --state-dir; then another machine can "
        "take the folder over; 0: no lease (default: 15 with --peers, else 0)",
    )
    drain_to: Literal["peers", "disk"] = Field(
        "peers",
        description="where SIGTERM leaves sessions: with the servers of --peers, or here on disk until a restart; "
        "without peers they stay (default: peers)",
    )
    balance: bool = Field(
        True, description="move resting sessions to a server of --peers with more room, when memory is nearly full"
    )
    role: Literal["both", "decode", "prefill"] = Field(
        "both",
        description="decode: prefill servers of the cluster compute its long prompts; prefill: it computes those of "
        "others; both: it computes its own",
    )
    prefill_apart_tokens: int = Field(
        512, ge=1, description="with --role decode, tokens without KV from which a prompt is long"
    )

    @field_validator("replica")
    @classmethod
    def _name_a_replica(cls, value: str | None) -> str | None:
        if value is not None and not REPLICA_NAME.fullmatch(value):
            raise ValueError(f"must be at most 16 of a-z and 0-9, a letter first; got {value[:40]!r}")
        return value

    @property
    def lease(self) -> float | None:
        """Seconds of the state folder's lease; None: it has none."""
        found = self.lease_s if self.lease_s is not None else CLUSTER_LEASE_S if self.peers is not None else 0
        return found or None
