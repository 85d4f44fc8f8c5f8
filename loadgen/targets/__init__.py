"""The servers under load: one protocol here, one file for each kind of server."""

from loadgen.load.workload import Signals
from loadgen.targets.base import Agent, MakesAgents, Target, TargetSpec
from loadgen.targets.djinn import DjinnTarget
from loadgen.targets.openai import OpenAITarget
from loadgen.targets.tools import ToolTarget

__all__ = ["Agent", "DjinnTarget", "MakesAgents", "OpenAITarget", "Target", "TargetSpec", "ToolTarget", "connect"]


def connect(spec: TargetSpec, signals: Signals) -> Target:
    """The target of a spec. Nothing is sent yet. Raises `LoadgenError` if the address is not HTTP."""
    if spec.model is None:
        return DjinnTarget(spec, signals)
    if spec.tools:
        return ToolTarget(spec, spec.model, signals if spec.signals else Signals.NONE)
    return OpenAITarget(spec, spec.model)
