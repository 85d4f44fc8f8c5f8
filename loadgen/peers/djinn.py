"""Djinn itself, as it is installed here, with one of its KV policies."""

import sys
from dataclasses import dataclass, replace
from importlib.metadata import version

from loadgen.peers.base import AUTO, SERVED_NAME, Say, ServerSettings, choose_dtype, on_cuda
from loadgen.processes.launch import Launch, checkpoint_folder, flatten
from loadgen.targets.base import WITH_SIGNALS, WITH_TOOLS

PACKAGES = ("djinn-server", "torch", "transformers", "numba", "numpy")


def djinn_launch(flags: dict[str, str]) -> Launch:
    """`djinn serve` of this interpreter.

    -P: the working folder may have its own `app`.
    """
    return Launch([sys.executable, "-P", "-m", "app", "serve", *flatten(flags)])


@dataclass(frozen=True, slots=True)
class DjinnPeer:
    """Djinn with its defaults but for `policy`, and in no state folder that an operator uses."""

    name: str
    policy: str
    tools: bool = False
    """Whether its agents are chats with tools."""
    signals: bool = True
    """Whether those signal their think times."""

    @property
    def served_model(self) -> str | None:
        """It is spoken to as Djinn, unless its agents are clients of OpenAI's API."""
        if not self.tools:
            return None
        return SERVED_NAME + WITH_TOOLS + (WITH_SIGNALS if self.signals else "")

    def is_installed(self) -> bool:
        """Always: the load generator comes with it."""
        return True

    def install(self, say: Say) -> None:
        """Nothing is left to do."""
        say("Djinn is here: the load generator comes with it")

    def launch(self, settings: ServerSettings, port: int) -> Launch:
        model = checkpoint_folder(settings.model) if settings.dtype == AUTO else settings.model
        choice = choose_dtype(settings)
        flags = {
            "--model": str(model),
            "--served-model-name": SERVED_NAME,
            "--dtype": settings.dtype,
            "--port": str(port),
            "--kv-policy": self.policy,
            "--state-dir": "none" if settings.state is None else str(settings.state),
        }
        if settings.kv_tokens is not None:
            flags["--kv-device"] = f"1x{settings.kv_tokens}"
        if settings.dtype == AUTO and choice.dtype == "bfloat16" and not on_cuda():
            flags["--matmul-precision"] = choice.dtype
        launch = replace(djinn_launch(flags), calibration=choice.calibration)
        return replace(launch, command=[*launch.command, "--bind-by-prefix"]) if self.tools else launch

    def versions(self) -> dict[str, str]:
        return {name: version(name) for name in PACKAGES}
