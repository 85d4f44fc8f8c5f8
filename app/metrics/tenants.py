"""Prometheus metrics of what each tenant has."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from app.domain.values import Tier


@dataclass(frozen=True, slots=True)
class TenantUse:
    """What one tenant has open and under way, and the KV of its sessions in bytes."""

    sessions: int
    turns_running: int
    turns_waiting: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int


def tenant_metrics(uses: Mapping[str, TenantUse]) -> Iterator[Metric]:
    """Every metric that follows from what tenants have, by their names. The empty name is that of callers without a
    key.
    """
    sessions = GaugeMetricFamily("djinn_tenant_sessions", "Open sessions of a tenant", labels=["tenant"])
    turns = GaugeMetricFamily("djinn_tenant_turns", "Turns of a tenant", labels=["tenant", "state"])
    kv = GaugeMetricFamily("djinn_tenant_kv_bytes", "KV of a tenant's sessions", labels=["tenant", "tier"])
    for tenant, use in uses.items():
        sessions.add_metric([tenant], use.sessions)
        turns.add_metric([tenant, "running"], use.turns_running)
        turns.add_metric([tenant, "waiting"], use.turns_waiting)
        for tier, size in ((Tier.DEVICE, use.device_bytes), (Tier.HOST, use.host_bytes), (Tier.DISK, use.disk_bytes)):
            kv.add_metric([tenant, tier], size)
    yield from (sessions, turns, kv)
