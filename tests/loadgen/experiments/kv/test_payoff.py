"""Whether packing pays, calculated by hand."""

from __future__ import annotations

import pytest

from loadgen.experiments.kv.codecs import Compression
from loadgen.experiments.kv.links import Link
from loadgen.experiments.kv.payoff import break_even, weigh

HALVED = Compression("half", True, raw_bytes=100, packed_bytes=50, pack_s=1.0, unpack_s=2.0)
USELESS = Compression("none", True, raw_bytes=100, packed_bytes=101, pack_s=0.001, unpack_s=0.001)


def test_one_step_after_the_other_and_pipelined() -> None:
    (found,) = weigh([Link("ten", 10.0)], [HALVED])
    assert (found.plain_s, found.in_turn_s, found.pipelined_s) == (10.0, 1.0 + 5.0 + 2.0, 5.0)


def test_the_slowest_step_decides_a_pipeline() -> None:
    (found,) = weigh([Link("hundred", 100.0)], [HALVED])
    assert (found.plain_s, found.in_turn_s, found.pipelined_s) == (1.0, 3.5, 2.0)


@pytest.mark.parametrize("way", ["in_turn", "pipelined"])
def test_at_break_even_both_take_the_same_time(way: str) -> None:
    speed = getattr(break_even(HALVED), way)
    below, at, above = weigh([Link(f"{factor}", factor * speed) for factor in (0.9, 1.0, 1.1)], [HALVED])
    assert getattr(at, f"{way}_s") == pytest.approx(at.plain_s)
    assert getattr(below, f"{way}_s") < below.plain_s
    assert getattr(above, f"{way}_s") > above.plain_s


def test_what_does_not_shrink_never_pays() -> None:
    limit = break_even(USELESS)
    assert (limit.in_turn, limit.pipelined) == (0.0, 0.0)
    (slowest,) = weigh([Link("slow", 1e-3)], [USELESS])
    assert slowest.in_turn_s > slowest.plain_s
    assert slowest.pipelined_s > slowest.plain_s


def test_every_codec_over_every_link() -> None:
    links = [Link("a", 1.0), Link("b", 2.0)]
    assert [(payoff.link, payoff.codec) for payoff in weigh(links, [HALVED, USELESS])] == [
        ("a", "half"),
        ("a", "none"),
        ("b", "half"),
        ("b", "none"),
    ]
