"""What `/metrics` counts: turns and steps, drafts, memory, waits for KV, and what each tenant has."""

import time
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.domain.values import Ticket
from app.messages import Started
from app.telemetry.metrics import Metrics
from app.telemetry.turn_metrics import TurnClock
from tests.conftest import ServeWith
from tests.routers.generating import in_tier, wait_for
from tests.tenants.tenant_files import tenant, write_tenants

VLLM_SERIES = {
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"),
    *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:request_queue_time_seconds_count"),
    *("vllm:time_to_first_token_seconds_count", "vllm:inter_token_latency_seconds_bucket"),
    "vllm:e2e_request_latency_seconds_sum",
}
"""What dashboards for vLLM read, by the names on the wire."""


def scrape(http: httpx.Client) -> dict[str, float]:
    """Every series by name, the sum over its labels."""
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    series: dict[str, float] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            series[sample.name] = series.get(sample.name, 0.0) + sample.value
    return series


def test_turns_and_steps_are_counted_under_both_names(serve_with: ServeWith) -> None:
    """On a CPU no step is replayed, and none is given to a device that is still at work."""
    http = serve_with(max_draft_tokens=0)
    families = {each.name: each for each in text_string_to_metric_families(http.get("/metrics").text)}
    ends = {sample.labels["finished_reason"]: sample.value for sample in families["djinn_turns_finished"].samples}
    assert ends == {"stop": 0, "length": 0, "cancelled": 0, "probe": 0, "shutdown": 0}, (
        "a rate needs a series before its first event"
    )
    session = http.post("/v1/sessions").json()["id"]
    body = {"token_ids": [5] * 20, "max_tokens": 5, "ignore_eos": True}
    http.post(f"/v1/sessions/{session}/generate", json=body)
    lines = http.get("/metrics").text.splitlines()
    for kind, steps in (("eager", 5), ("replayed", 0), ("runs", 0)):
        assert f'djinn_steps_total{{kind="{kind}"}} {steps}.0' in lines
    assert "djinn_steps_followed_total 0.0" in lines
    assert "djinn_step_tokens_total 24.0" in lines  # the fifth token is chosen, and not computed
    assert "djinn_resumed_first_token_seconds_count 0.0" in lines
    http.post(f"/v1/sessions/{session}/generate", json=body)
    found = scrape(http)
    assert found.keys() >= VLLM_SERIES
    assert found["djinn_sessions"] == 1
    assert found["djinn_generation_tokens_total"] == found["vllm:generation_tokens_total"] == 10
    assert found["vllm:prompt_tokens_total"] == 20 + 45
    assert found["vllm:prefix_cache_hits_total"] >= 24
    assert found["vllm:time_to_first_token_seconds_count"] == found["vllm:request_success_total"] == 2
    assert found["vllm:inter_token_latency_seconds_count"] == 8
    assert 0 < found["vllm:kv_cache_usage_perc"] < 1
    assert found["djinn_resumed_first_token_seconds_count"] == 1
    whole = found["djinn_resumed_first_token_seconds_sum"]
    assert found["djinn_resumed_wait_seconds_total"] == pytest.approx(whole, rel=0.05, abs=0.005)
    families = {each.name: each for each in text_string_to_metric_families(http.get("/metrics").text)}
    aliases = [sample for name, each in families.items() if name.startswith("vllm:") for sample in each.samples]
    assert all(sample.labels["model_name"] == "tiny-llama" and sample.labels["engine"] == "0" for sample in aliases)


def test_drafts_are_counted_and_save_steps(serve_with: ServeWith) -> None:
    http = serve_with()
    session = http.post("/v1/sessions").json()["id"]
    repeating = {"token_ids": [5] * 20, "max_tokens": 30, "ignore_eos": True, "logit_bias": {"5": 100}}
    answer = http.post(f"/v1/sessions/{session}/generate", json=repeating).json()
    assert answer["token_ids"] == [5] * 30
    found = scrape(http)
    assert 0 < found["djinn_draft_tokens_accepted_total"] <= found["djinn_draft_tokens_total"]
    assert found["djinn_steps_total"] + found["djinn_draft_tokens_accepted_total"] >= 30
    assert found["vllm:spec_decode_num_draft_tokens_total"] == found["djinn_draft_tokens_total"]
    assert found["vllm:spec_decode_num_accepted_tokens_total"] == found["djinn_draft_tokens_accepted_total"]


def test_what_the_memory_map_tells_is_there_by_tier_and_direction(serve_with: ServeWith) -> None:
    http = serve_with()
    session = http.post("/v1/sessions").json()["id"]
    http.post(f"/v1/sessions/{session}/generate", json={"token_ids": [5] * 20, "max_tokens": 5, "ignore_eos": True})
    http.post(f"/v1/sessions/{session}/phase", json={"phase": "io_wait"})
    wait_for(http, f"/v1/sessions/{session}", in_tier("host"))
    memory = http.get("/v1/memory").json()
    families = {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}

    def series(name: str, label: str) -> dict[str, float]:
        return {sample.labels[label]: sample.value for sample in families[name].samples}

    assert series("djinn_sessions_by_tier", "tier") == memory["sessions_by_tier"]
    for name, figure in (("moves", "count"), ("moved_bytes", "bytes"), ("move_seconds", "seconds")):
        expected = {direction: moved[figure] for direction, moved in memory["moves"].items()}
        assert series(f"djinn_kv_{name}", "direction") == expected
    assert series("djinn_kv_moves", "direction")["out"] >= 1
    for count, value in memory["counts"].items():
        assert [sample.value for sample in families[f"djinn_kv_{count}"].samples] == [value]
    bytes_by_tier = {
        (sample.labels["tier"], f"{sample.labels['kind']}_bytes"): sample.value
        for sample in families["djinn_kv_bytes"].samples
    }
    for tier in ("device", "host", "disk"):
        for kind, value in memory["data"][tier].items():
            assert bytes_by_tier[tier, kind] == value


def test_a_wait_for_kv_is_not_a_wait_in_the_queue() -> None:
    metrics = Metrics("m")
    clock = TurnClock(metrics.turns)
    clock.observe(Started(Ticket(1), 0, restore_ms=300.0, at=time.perf_counter() + 0.5))
    assert clock.restore_ms == 300
    assert 200 <= clock.queue_ms < 450
    TurnClock(metrics.turns).observe(Started(Ticket(2), 0))
    counts = {
        sample.name: sample.value
        for histogram in (metrics.turns.restore, metrics.turns.queue)
        for family in histogram.collect()
        for sample in family.samples
    }
    assert counts["djinn_turn_restore_seconds_count"] == 1
    assert counts["djinn_turn_restore_seconds_sum"] == pytest.approx(0.3)
    assert counts["djinn_turn_queue_seconds_count"] == 2


def test_what_each_tenant_has_is_there_by_its_name(serve_with: ServeWith, tmp_path: Path) -> None:
    tenants = tenant("acme"), tenant("bolt"), tenant("olga", role="operator")
    http = serve_with(tenants=write_tenants(tmp_path / "tenants.json", *tenants))
    session = http.post("/v1/sessions", headers={"X-Api-Key": "acme"}).json()["id"]
    turn = {"token_ids": [5] * 20, "max_tokens": 5, "ignore_eos": True}
    http.post(f"/v1/sessions/{session}/generate", headers={"X-Api-Key": "acme"}, json=turn).raise_for_status()
    http.post("/v1/sessions", headers={"X-Api-Key": "bolt"}).raise_for_status()
    as_operator = {"X-Api-Key": "olga"}
    uses = http.get("/v1/memory", headers=as_operator).json()["tenants"]
    assert uses["acme"]["device_bytes"] > 0
    families = text_string_to_metric_families(http.get("/metrics", headers=as_operator).text)
    found = {(each.name, *sorted(each.labels.values())): each.value for family in families for each in family.samples}
    for name, use in uses.items():
        assert found["djinn_tenant_sessions", name] == use["sessions"]
        for tier in ("device", "host", "disk"):
            assert found["djinn_tenant_kv_bytes", *sorted((name, tier))] == use[f"{tier}_bytes"]
        for state in ("running", "waiting"):
            assert found["djinn_tenant_turns", *sorted((name, state))] == use[f"turns_{state}"]
    assert {"acme", "bolt"} == uses.keys()
