"""One answer made of those of all replicas. Everything here is plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

SAME = frozenset({"block_bytes", "block_tokens", "policy"})
"""Figures of memory that all replicas of one model have alike."""


def merged_models(pages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Every model once, in the form that the replicas' lists have."""
    models = {model["id"]: model for page in pages for model in reversed(page["data"])}
    last = {"last_id": list(models)[-1]} if "last_id" in pages[0] else {}
    return {**pages[0], **last, "data": list(models.values())}


def merged_page(pages: Sequence[Mapping[str, Any]], limit: int) -> dict[str, Any]:
    """A page of `limit` sessions in the order of their ids, of the replicas' pages behind the same place.

    A session that has just moved may still be listed at its old home too, as it was there: the one used last counts.
    """
    listed = sorted((session for page in pages for session in page["data"]), key=lambda session: session["used_at"])
    found = {session["id"]: session for session in listed}
    sessions = [found[each] for each in sorted(found)]
    has_more = len(sessions) > limit or any(page["has_more"] for page in pages)
    return {**pages[0], "data": sessions[:limit], "has_more": has_more}


def merged_memory(views: Sequence[Any]) -> Any:
    """The sums of all figures; of what has moved, the bytes of a second of all copies."""
    first = views[0]
    if isinstance(first, Mapping):
        names = dict.fromkeys(name for view in views for name in view)
        found = {}
        for name in names:
            values = [view[name] for view in views if name in view]
            found[name] = values[0] if name in SAME else merged_memory(values)
        if "bytes_per_s" in found:
            found["bytes_per_s"] = found["bytes"] / found["seconds"] if found["seconds"] else None
        return found
    known = [view for view in views if view is not None]
    return sum(known) if known and not isinstance(known[0], Mapping) else merged_memory(known) if known else None


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def merged_metrics(texts: Mapping[str, str]) -> bytes:
    """Metrics of all replicas in one text; each sample has its replica's name, the key of `texts`, as a label."""
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text):
            into = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                into.samples.append(sample._replace(labels={**sample.labels, "replica": replica}))
    return generate_latest(_Families(families.values()))
