"""The tables: one of ratios, one of every data type."""

from benchmarks.peers.peers import DJINN, PEERS
from benchmarks.peers.rounds import Round
from benchmarks.peers.summary import Metric, best_by_peer, metrics_of, times_better, values_by_variant
from loadgen.results.spread import Spread
from loadgen.results.tables import TextTable

NAMES = {"djinn": "Djinn", "vllm": "vLLM", "transformers": "Transformers"}


def ratio_table(rounds: list[Round]) -> TextTable:
    """Each peer's best data type, and how many times better Djinn is where it took part."""
    peers = [peer for peer in PEERS if any(entry.peer == peer for entry in rounds)]
    baselines = [peer for peer in peers if peer != DJINN] if DJINN in peers else []
    header = ("", *(NAMES[peer] for peer in peers), *(f"Djinn vs. {NAMES[peer]}" for peer in baselines))
    rows = []
    for metric in metrics_of(rounds[0].measurement):
        best = best_by_peer(rounds, metric)
        cells = [f"{_figure(metric, best[peer].spread.median)} ({best[peer].dtype})" for peer in peers]
        ratios = [_ratio(times_better(rounds, metric, DJINN, peer)) for peer in baselines]
        rows.append((f"{metric.label} ({metric.unit})", *cells, *ratios))
    return TextTable("Best data type of each", header, rows)


def variant_table(rounds: list[Round]) -> TextTable:
    """Every peer with every data type: median, lowest and highest round."""
    variants = list(dict.fromkeys((entry.peer, entry.dtype) for entry in rounds))
    variants.sort(key=lambda variant: PEERS.index(variant[0]))
    rows = []
    for metric in metrics_of(rounds[0].measurement):
        values = values_by_variant(rounds, metric)
        cells = [_range(metric, Spread.over(list(values[variant].values()))) for variant in variants]
        rows.append((f"{metric.label} ({metric.unit})", *cells))
    return TextTable("Every data type", ("", *(f"{NAMES[peer]} {dtype}" for peer, dtype in variants)), rows)


def _figure(metric: Metric, value: float) -> str:
    return f"{value:.1f}" if metric.higher_is_better else f"{value:.3f}"


def _range(metric: Metric, values: Spread) -> str:
    return _figure(metric, values.median) + _bounds(_figure(metric, values.low), _figure(metric, values.high))


def _ratio(values: Spread) -> str:
    return f"{values.median:.2f}×" + _bounds(f"{values.low:.2f}", f"{values.high:.2f}")


def _bounds(low: str, high: str) -> str:
    """Nothing where one round leaves nothing to say."""
    return "" if low == high else f" [{low}, {high}]"
