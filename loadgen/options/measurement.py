"""The options that say how a load is measured."""

import argparse

from loadgen.load.measurement import Measurement, Slo

DEFAULTS = Measurement()


def add_measurement_options(parser: argparse.ArgumentParser) -> None:
    """The fields of `Measurement` with its defaults."""
    for flag, kind, default, text in (
        ("--repeats", int, DEFAULTS.repeats, "times that every target runs the trace, in alternating order"),
        ("--warmup", float, DEFAULTS.warmup_s, "seconds at the start of a run of which no turn is measured"),
        ("--turn-timeout", float, DEFAULTS.turn_timeout_s, "seconds after which a turn has failed"),
    ):
        parser.add_argument(flag, type=kind, default=default, metavar="N", help=f"{text} (default: {default:g})")
    for flag, text in (
        ("--slo-ttft", "seconds to the first token that a good turn takes at most"),
        ("--slo-tpot", "seconds per further token that a good turn takes at most"),
    ):
        parser.add_argument(flag, type=float, metavar="N", help=f"{text} (default: no limit)")


def read_measurement(options: argparse.Namespace) -> Measurement:
    """What the options say. Raises `LoadgenError` for values outside their range."""
    return Measurement(
        repeats=options.repeats,
        warmup_s=options.warmup,
        turn_timeout_s=options.turn_timeout,
        slo=Slo(options.slo_ttft, options.slo_tpot),
    )
