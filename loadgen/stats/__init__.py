"""From records to figures. Pure."""

from loadgen.stats.distribution import Distribution
from loadgen.stats.goodput import Goodput
from loadgen.stats.spread import HEADLINES, Headline, spread
from loadgen.stats.summary import Summary, summarize
from loadgen.stats.traffic import Swaps

__all__ = ["HEADLINES", "Distribution", "Goodput", "Headline", "Summary", "Swaps", "spread", "summarize"]
