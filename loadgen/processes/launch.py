"""How a server is started and what of that may be published; the processor, and the data type that it multiplies
fastest.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from importlib.metadata import Distribution, distributions, version
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from loadgen.errors import LoadgenError

X86_FLAGS = "avx2 avx512f avx512_vnni avx512_bf16 avx512_fp16 avx_vnni amx_bf16 amx_int8"
FLAGS = (*X86_FLAGS.split(), "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2")
"""Those that count, in the words of Linux: first x86's, then ARM's."""
NO_FLAGS = "no vector flags known"
CPUINFO = Path("/proc/cpuinfo")
MASKS = {"ATEN_CPU_CAPABILITY": "aten", "ONEDNN_MAX_CPU_ISA": "onednn", "NUMBA_CPU_NAME": "numba"}
"""Variables that keep PyTorch, oneDNN and our own kernels from using all instructions there are, in short.
`NUMBA_CPU_FEATURES` goes with the last one."""


def processor_flags() -> tuple[str, ...]:
    """Those of `FLAGS` that this machine's processor has; none where the kernel does not tell. Then one for each of
    `MASKS` that is set, such as `aten_avx2`.
    """
    masked = tuple(f"{name}_{os.environ[mask].lower()}" for mask, name in MASKS.items() if os.environ.get(mask))
    try:
        return flags_in(CPUINFO.read_text("utf-8")) + masked
    except OSError:
        return masked


def flags_in(cpuinfo: str) -> tuple[str, ...]:
    """Those of `FLAGS` that the text of a /proc/cpuinfo names, in the order of `FLAGS`."""
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    found = set() if line is None else set(line[1].split())
    return tuple(flag for flag in FLAGS if flag in found)


def cache_folder() -> Path:
    """What `DJINN_CACHE_DIR` names, which the server reads too, or else `~/.cache/djinn`."""
    return Path(os.environ.get("DJINN_CACHE_DIR") or "~/.cache/djinn")


def default_model() -> Path:
    """The model that is measured unless another is named. It may not be there yet."""
    return cache_folder() / "models/smollm2-135m-instruct"


def checkpoint_folder(model: Path) -> Path:
    """What Djinn serves with the weights of the Transformers folder `model`: the GGUF file that it was made of, by the
    link that `djinn models export` left there, or else the folder itself.
    """
    checkpoint = model / "checkpoint"
    return checkpoint if checkpoint.exists() else model


def checkpoint_file(model: Path) -> Path | None:
    """The GGUF file that the Transformers folder `model` was made of, if there is one."""
    file = model / "checkpoint.gguf"
    return file if file.exists() else None


def peers_folder() -> Path:
    """Environments, logs, and notes about running servers."""
    return cache_folder().expanduser() / "peers"


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
    """The remembered speeds of this processor, this PyTorch and the model's shapes; measured in seconds if unknown.

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


ROOT = Path(__file__).resolve().parents[2]
"""Where the packages are: the checkout, or what the wheel is installed in."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line and what it adds to the environment. `calibration` has the figures that chose its data type."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    calibration: Calibration | None = None

    def as_words(self) -> tuple[str, ...]:
        """The command as a shell takes it, with what it adds to the environment in front."""
        return (*(f"{name}={value}" for name, value in self.environment.items()), *self.command)


def without_folders(launch: Launch, folders: Sequence[Path]) -> Launch:
    """The launch as it may be published: files in `folders` without the place of these folders on this machine, and
    this interpreter's environment as `.venv`, wherever it is.
    """

    def shorten(text: str) -> str:
        text = text.replace(f"{sys.prefix}/", ".venv/")
        for folder in folders:
            text = "." if text == str(folder) else text.replace(f"{folder}/", "")
        return text

    environment = {name: shorten(value) for name, value in launch.environment.items()}
    return replace(launch, command=[shorten(part) for part in launch.command], environment=environment)


def flatten(flags: Mapping[str, str]) -> list[str]:
    """Flags and their values as parts of a command line."""
    return [part for pair in flags.items() for part in pair]


TORCH = "torch==2.13.0"
STAMP = "complete"


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment in `folder`."""

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def make(self) -> None:
        """Begin anew, with nothing but pip in it. Raises `LoadgenError`."""
        run_step([sys.executable, "-m", "venv", "--clear", str(self.folder)])

    def pip(self, *arguments: str) -> None:
        """Have its pip do something. Raises `LoadgenError`; what pip said has been shown."""
        run_step([str(self.python), "-m", "pip", "--quiet", *arguments])

    def find(self, name: str) -> Distribution:
        """A package installed in it. Raises `LookupError` if it is not there."""
        folders = [str(folder) for folder in self.folder.glob("lib/python*/site-packages")]
        for distribution in distributions(name=name, path=folders):
            return distribution
        raise LookupError(f"{name} is not installed in {self.folder}")


def has_stamp(folder: Path, stamp: str) -> bool:
    """Whether what is in `folder` was completed, as `stamp` says."""
    file = folder / STAMP
    return file.exists() and file.read_text() == stamp


def write_stamp(folder: Path, stamp: str) -> None:
    """What is in `folder` is complete."""
    (folder / STAMP).write_text(stamp)


def run_step(command: list[str]) -> None:
    """Run one command of an installation, whose output is shown. Raises `LoadgenError` if it fails."""
    try:
        subprocess.run(command, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise LoadgenError(f"installation failed: {error}") from error
