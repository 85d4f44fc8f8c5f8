"""The servers under load: one protocol here, one file for each kind of server."""

from loadgen.load.workload import Signals
from loadgen.targets.base import Agent, Target, TargetSpec
from loadgen.targets.djinn import DjinnTarget
from loadgen.targets.openai import OpenAITarget

__all__ = ["Agent", "DjinnTarget", "OpenAITarget", "Target", "TargetSpec", "connect"]


def connect(spec: TargetSpec, signals: Signals) -> Target:
    """The target of a spec. Nothing is sent yet. Raises `LoadgenError` if the address is not HTTP."""
    return DjinnTarget(spec, signals) if spec.model is None else OpenAITarget(spec, spec.model)
