"""Which data type PyTorch is fastest in on this machine: measured in a process of its own, once, and remembered."""

import json
import subprocess
import sys
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from loadgen.errors import LoadgenError
from loadgen.processes.folders import cache_folder
from loadgen.processes.processor import processor_flags

ROWS = (1, 32, 256)
"""One stream that decodes, many, and a part of a prompt."""
WIDEST = 2048
"""A wider model is measured at this width: its types differ as much, and the measurement stays short."""
PROBE = "loadgen.rivals.dtype_probe"
PROBE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds of the product of `rows` rows with weights `[outputs, inputs]`, for each of `rows`, by data type.

    `torch` is PyTorch's version, `flags` are the processor's, and `cores` is how many cores computed.
    """

    flags: tuple[str, ...]
    torch: str
    cores: int
    outputs: int
    inputs: int
    rows: tuple[int, ...]
    seconds: dict[str, tuple[float, ...]]

    @property
    def dtype(self) -> str:
        """The fastest type. All counts of rows weigh alike: the product of its times is the least."""
        return min(self.seconds, key=self._product)

    def _product(self, dtype: str) -> float:
        product = 1.0
        for seconds in self.seconds[dtype]:
            product *= seconds
        return product


def calibrate(model: Path, cores: int) -> Calibration:
    """What is remembered of this processor, this PyTorch and the model's shapes; measured in a second where nothing is.

    Raises `LoadgenError` if the model's config.json gives no shapes, or the measurement fails.
    """
    outputs, inputs = _shape(model)
    machine = {"flags": processor_flags(), "torch": version("torch"), "cores": cores}
    key = {**machine, "outputs": outputs, "inputs": inputs, "rows": ROWS}
    name = sha256(json.dumps(key).encode()).hexdigest()[:16]
    file = cache_folder().expanduser() / "calibration" / f"{name}.json"
    try:
        return TypeAdapter(Calibration).validate_json(file.read_bytes())
    except (FileNotFoundError, ValidationError):  # the file of another version is written anew
        found = TypeAdapter(Calibration).validate_python({**key, **_measure(outputs, inputs, cores)})
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_bytes(TypeAdapter(Calibration).dump_json(found))
    partial.replace(file)
    return found


def _shape(model: Path) -> tuple[int, int]:
    """Outputs and inputs of the largest matrix of a layer, as far as they are measured."""
    try:
        config = json.loads((model / "config.json").read_text("utf-8"))
        config = config.get("text_config", config)
        inputs = int(config.get("hidden_size") or config["n_embd"])
        outputs = int(config.get("intermediate_size") or 4 * inputs)
    except (OSError, ValueError, KeyError) as error:
        raise LoadgenError(f"no shapes in {model / 'config.json'}; name a type with --dtype") from error
    return min(outputs, WIDEST), min(inputs, WIDEST)


def _measure(outputs: int, inputs: int, cores: int) -> dict[str, object]:
    command = [sys.executable, "-m", PROBE, *map(str, (outputs, inputs, cores, *ROWS))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PROBE_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise LoadgenError(f"measuring data types failed; name one with --dtype:\n{error.stderr[-1000:]}") from error
    except subprocess.TimeoutExpired as error:
        raise LoadgenError(f"measuring data types took over {PROBE_TIMEOUT_S:g} s; name one with --dtype") from error
    found: dict[str, object] = json.loads(done.stdout)
    return found
