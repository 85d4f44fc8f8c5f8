"""What runs: a model, a budget, and the servers of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.experiments.weights.plan import WeightsPlan
from loadgen.experiments.weights.sizes import ModelBytes
from loadgen.peers.base import ServerSettings
from loadgen.peers.djinn import DjinnPeer
from loadgen.peers.serving import ManagedTarget

STREAMED, RESIDENT = "djinn-streamed", "djinn-resident"
LEAST_STEP_TOKENS = 512
"""The server's own default."""


@dataclass(frozen=True, slots=True)
class Setup:
    """`budget` bytes of weights may be on the device. `folder` is a scratch folder on a disk."""

    settings: ServerSettings
    model_bytes: ModelBytes
    budget: int
    folder: Path

    def servers(self, plan: WeightsPlan) -> list[ManagedTarget]:
        """Djinn with its weights streamed, and with all of them on the device."""
        return [self._server(STREAMED, plan, self._budget_flag), self._server(RESIDENT, plan, {})]

    def chunked_servers(self, plan: WeightsPlan) -> list[ManagedTarget]:
        """Djinn with its weights streamed, in copies of each size."""
        return [
            self._server(f"djinn-chunk-{size}", plan, {**self._budget_flag, "--chunk-size": str(size)})
            for size in plan.chunks
        ]

    def for_programs(self) -> Mapping[str, Any]:
        """What the programs beside the servers are told."""
        return {
            "model": str(self.settings.model),
            "dtype": self.settings.dtype,
            "budget_bytes": self.budget,
            "folder": str(self.folder),
        }

    def weight_files(self) -> Iterator[Path]:
        """All files that anybody here reads weights from."""
        yield from self.settings.model.glob("*.safetensors")
        yield from (path for path in self.folder.rglob("*") if path.is_file())

    @property
    def _budget_flag(self) -> dict[str, str]:
        return {"--weights-device": str(self.budget)}

    def _server(self, name: str, plan: WeightsPlan, flags: Mapping[str, str]) -> ManagedTarget:
        """A pass computes a whole prompt or a token of each session. A CPU's file lies in the scratch folder."""
        common = {
            "--max-step-tokens": str(max(plan.prompt, LEAST_STEP_TOKENS)),
            "--max-draft-tokens": "0",
            "--cache-dir": str(self.folder / "cache"),
        }
        return ManagedTarget(name, DjinnPeer(name, policy="signal", flags={**common, **flags}), self.settings)
