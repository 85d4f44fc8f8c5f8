"""Ids of events of the whole cluster: each names the last event of every replica."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from app.domain.homes import REPLICA_NAME

ONE = re.compile(rf"({REPLICA_NAME.pattern})=([0-9a-f]{{1,16}}-[0-9]{{1,20}})")


def joined_id(ids: Mapping[str, str]) -> str:
    """One id of those of all replicas."""
    return ",".join(f"{name}={ids[name]}" for name in sorted(ids))


def split_id(event_id: str, names: Iterable[str]) -> dict[str, str]:
    """The id of each replica; empty if these are not the replicas that it was made for, or it was made by nobody."""
    found = [ONE.fullmatch(part) for part in event_id.split(",")]
    ids = {each[1]: each[2] for each in found if each is not None}
    return ids if len(ids) == len(found) and set(ids) == set(names) else {}
