"""Samples made by hand."""

from __future__ import annotations

from loadgen.experiments.resume_latency.findings import Findings, Sample, ServerSplit, Way

LAYERS = 4


def sample(
    way: Way, layer: int, standing_s: float, token_s: float | None, *, repeat: int = 0, length: int = 64, token: int = 7
) -> Sample:
    """One way back. Djinn's have a split of the server."""
    split = ServerSplit(1e-5, standing_s / 2, 1e-4) if way is Way.DJINN else None
    return Sample(way, length, layer, repeat, standing_s, token_s, None if token_s is None else token, 1024, split)


def crossing_at_layer_2() -> Findings:
    """At layers 0 and 1 a recompute is sooner, and from layer 2 on Djinn, who is as far from both in both measures."""
    findings = Findings(passes={64: 0})
    for repeat in range(3):
        for layer in range(LAYERS):
            computed = 0.01 * (layer + 1)
            findings.samples += [
                sample(Way.RECOMPUTE, layer, computed, 0.04, repeat=repeat),
                sample(Way.OFFLOAD, layer, 0.005, 0.055 - computed, repeat=repeat),
                sample(Way.DJINN, layer, 0.025, 0.065 - computed, repeat=repeat),
            ]
    return findings
