"""A load in words."""

from loadgen.load.arrivals import Arrivals
from loadgen.load.workload import Load, Replay, Signals, Workload


def load_in_words(load: Workload | Replay) -> str:
    """The load in a sentence."""
    if isinstance(load, Replay):
        return (
            f"The agents of {load.trace.name}, {load.system_tokens} tokens shared; signals: {load.signals}."
            f"{_scale(load)}"
        )
    return f"{load.agents} agents, {load.rate:g} a second ({arrivals_in_words(load)}), {agent_in_words(load)}"


def agent_in_words(load: Workload) -> str:
    """The rest of the sentence: what each agent does."""
    return (
        f"{load.turns} turns each: a prompt of {load.context} tokens ({load.system_tokens} shared), "
        f"{load.resume_tokens} more in each later turn, {load.completion_tokens} generated; seconds of thinking in "
        f"between: {load.think}{_tools(load)}; signals: {_signals(load)}.{_scale(load)}"
    )


def _scale(load: Load) -> str:
    return "" if load.time_scale == 1 else f" All times multiplied by {load.time_scale:g}."


def arrivals_in_words(load: Workload) -> str:
    """How the gaps between arrivals are distributed."""
    return f"gamma, burstiness {load.burstiness:g}" if load.arrivals is Arrivals.GAMMA else load.arrivals


def _signals(load: Workload) -> str:
    """How well the agents know when they come back is a part of what is measured."""
    if load.signals is not Signals.ETA:
        return load.signals
    return f"eta, off by a lognormal factor of sigma {load.eta_noise:g}" if load.eta_noise else "eta, exact"


def _tools(load: Workload) -> str:
    if not load.tool_share:
        return ""
    return f", after the {load.tool_share:.0%} of turns that call a tool: {load.tool_think}"
