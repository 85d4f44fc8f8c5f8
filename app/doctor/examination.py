"""What the doctor finds out about the machine, how it judges that, and what it says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from app.doctor.device import (
    LEAST_BYTES,
    Driver,
    Link,
    buffer_bytes,
    check_capability,
    check_copies,
    check_cpu,
    check_driver,
    check_gpu,
    check_link,
    choose_device,
    cpu_name,
    nvidia_cards,
    read_link,
    read_release,
)
from app.doctor.host import (
    Disk,
    Numa,
    Pinned,
    Versions,
    check_device_memory,
    check_disk,
    check_host_memory,
    check_memlock,
    check_numa,
    check_pinned,
    check_versions,
    read_disk,
    read_memlock,
    read_numa,
    read_versions,
)
from app.doctor.probe import GPU, Copies, Finding, MachineProbe, Status, TorchBuild, error, first_line, ok, warning
from app.domain.errors import DjinnError, WeightsLost
from app.domain.values import WeightsDtype
from app.gpu.weights.file import REMEDY, WeightFile
from app.gpu.weights.layout import UnusableFile
from app.machine.files import size
from app.machine.memory import HostMemory, read_host_memory
from app.settings import Settings


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What only the device itself can tell.

    problem: why a GPU did not answer. copies: None if they were not possible, for the reason in copies_problem; they
    are not tried where nothing can be pinned. link: None where the machine does not tell, or not the truth.
    """

    gpu: GPU | None = None
    problem: str | None = None
    pinned: Pinned | None = None
    copies: Copies | None = None
    copies_problem: str | None = None
    link: Link | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """Sizes in bytes. nvidia_cards: on the PCI bus. memlock_bytes: None if unlimited. numactl: whether it is installed.
    disk: None without a state directory.
    """

    cpu: str
    nvidia_cards: int
    torch: TorchBuild
    driver: Driver
    device: DeviceFacts
    numa: Numa
    numactl: bool
    memlock_bytes: int | None
    host: HostMemory
    disk: Disk | None
    versions: Versions


def _ask_device(device: str, build: TorchBuild, host_free: int, probe: MachineProbe, root: Path) -> DeviceFacts:
    if device == "cpu":
        copies, problem = _measure(probe, None, buffer_bytes(host_free, host_free))
        return DeviceFacts(copies=copies, copies_problem=problem)
    index = int(device.removeprefix("cuda:"))
    if index >= build.gpu_count:
        return DeviceFacts()
    try:
        gpu = probe.gpu(index)
    except RuntimeError as failure:
        return DeviceFacts(problem=first_line(failure))
    num_bytes = buffer_bytes(host_free, gpu.free_bytes)
    try:
        probe.pin(index, num_bytes)
        pinned = Pinned(num_bytes, None)
    except RuntimeError as failure:
        pinned = Pinned(num_bytes, first_line(failure))
    copies, problem = _measure(probe, index, num_bytes) if pinned.problem is None else (None, None)
    return DeviceFacts(gpu, None, pinned, copies, problem, _true_link(read_link(root, gpu.pci_address), copies))


def _true_link(link: Link | None, copies: Copies | None) -> Link | None:
    """Virtual machines make links up, and some GPUs have a better way to host memory than PCIe: copies prove it."""
    if link is None or copies is None:
        return link
    fastest = max(copies.to_device.median, copies.from_device.median)
    return None if fastest > link.bytes_per_second else link


def _measure(probe: MachineProbe, index: int | None, num_bytes: int) -> tuple[Copies | None, str | None]:
    """`index`: of the GPU, None for a CPU."""
    if num_bytes < LEAST_BYTES:
        return None, f"there is room for buffers of {size(num_bytes)} only"
    try:
        return (probe.cpu_copies(num_bytes) if index is None else probe.gpu_copies(index, num_bytes)), None
    except RuntimeError as failure:
        return None, first_line(failure)


SEVERITY = list(Status)
STYLES = {Status.OK: "green", Status.WARNING: "yellow", Status.ERROR: "bold red"}


@dataclass(frozen=True, slots=True)
class Report:
    """device: what `djinn serve` would use. status: the worst of the findings. Its JSON is published as
    docs/doctor.schema.json; a change of its form is another `schema_version`.
    """

    schema_version: Literal[1]
    device: str
    status: Status
    findings: list[Finding]
    facts: Facts

    @classmethod
    def of(cls, device: str, findings: Sequence[Finding], facts: Facts) -> Report:
        """The report of an examination."""
        worst = max((finding.status for finding in findings), key=SEVERITY.index)
        return cls(1, device, worst, list(findings), facts)

    def to_json(self) -> str:
        """One JSON object, indented."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)

    def print(self, console: Console) -> None:
        """A line for each finding, and under it the remedy; never broken, so that a command can be copied."""
        for finding in self.findings:
            line = Text.assemble(
                (f"{finding.status:<9}", STYLES[finding.status]),
                (f"{finding.name.replace('_', ' '):<20}", "bold"),
                finding.summary,
            )
            console.print(line, soft_wrap=True)
            if finding.remedy is not None:
                console.print(Text(f"{'':<9}-> {finding.remedy}"), soft_wrap=True)
        console.print(self._verdict(), soft_wrap=True)

    def _verdict(self) -> Text:
        counts = {status: sum(finding.status is status for finding in self.findings) for status in SEVERITY}
        parts = [
            f"{counts[status]} {status}{'s' * (counts[status] > 1)}" for status in SEVERITY[:0:-1] if counts[status]
        ]
        return Text(f"\n{self.device}: {', '.join(parts) or 'all is well'}", STYLES[self.status])


MODEL, WEIGHTS = "model", "weights"


def check_weights(folder: Path) -> list[Finding]:
    """One line for each file of weights in `folder`, which is read wholly: 140 GB take minutes."""
    found = [_check(path) for path in sorted(folder.glob("*.safetensors"))]
    return found or [ok(WEIGHTS, f"there are no copies of streamed weights in {folder}")]


def _check(path: Path) -> Finding:
    try:
        file = WeightFile(path)
    except (UnusableFile, OSError) as problem:
        return error(WEIGHTS, f"{path} cannot be used: {problem}", REMEDY)
    try:
        file.check()
    except WeightsLost as lost:
        return error(WEIGHTS, lost.message.removesuffix(f". {REMEDY}"), REMEDY)
    finally:
        file.close()
    return ok(WEIGHTS, f"{path} is whole, {size(path.stat().st_size)}")


def check_model(settings: Settings) -> Finding:
    """One line about what `settings.model` would take of this machine, and how it would run. It loads no weights: it
    reads the tokenizer, and the names and sizes of all tensors. It fetches or converts the model first where needed.
    """
    from app.gpu.device.hardware import dtype_name  # these import all that a model needs
    from app.gpu.models import can_be_streamed
    from app.gpu.models.recipe import Recipe
    from app.gpu.startup.weights import QUANTIZED, RESIDENT_SHARE, free_bytes, needed_bytes, require_fitting
    from app.model_store.resolve import load_tokenizer, resolve
    from app.model_store.tensors import GgufIndex, is_indexed

    try:
        model = resolve(
            settings.model, cache_dir=settings.cache_dir, weights_dtype=WeightsDtype(settings.weights_dtype)
        )
        require_fitting(model)
        load_tokenizer(model)
        quantization, how = getattr(model.config, QUANTIZED, None), "as stored"
        if quantization is not None and model.folder is not None:
            how = str(quantization["quant_method"])
            how += ", kept so" if can_be_streamed(model) else ", dequantized at the start"
        elif model.folder is not None and is_indexed(model.folder):
            how = ", ".join(sorted({each.kind for each in GgufIndex.read(model.folder).tensors.values()}))
        recipe = Recipe.choose(model, settings.engine())
        needed, free = needed_bytes(recipe), free_bytes(recipe.device)
    except DjinnError as failure:
        return error(MODEL, failure.message, "use another model, or other settings: docs/models.md")
    layers = "Djinn's own layers" if can_be_streamed(model) else "Transformers' modules"
    said = (
        f"{model.name}: {model.config.model_type} on {layers}, in {dtype_name(recipe.dtype)}; weights ({how}) take "
        f"{size(needed)} of {size(free)} that are free on {recipe.device}"
    )
    if needed <= free * RESIDENT_SHARE:
        return ok(MODEL, said)
    if can_be_streamed(model):
        return warning(MODEL, f"{said}: they would be streamed", "use a smaller weights_dtype, or docs/weight-ring.md")
    return error(MODEL, f"{said}, which is too little", "use a smaller model, or a quantized one of Djinn's own layers")


def examine(
    requested: str,
    state_dir: Path | None,
    probe: MachineProbe,
    root: Path = Path("/"),
    weights_dir: Path | None = None,
) -> Report:
    """Examine the machine for `--device requested --state-dir state_dir`. Takes a second or two, most of it copying.
    The copies of weights in `weights_dir`, if it is given, are read wholly, which takes minutes for large ones. `root`
    is where the kernel's `sys` and `proc` are.

    Raises `FieldOutOfRange` if `requested` is not the name of a device, there or not.
    """
    build = probe.build()
    device = choose_device(requested, build.gpu_count)
    host = read_host_memory(root)
    found = _ask_device(device, build, host.free_bytes, probe, root)
    facts = Facts(
        cpu=cpu_name(root),
        nvidia_cards=nvidia_cards(root),
        torch=build,
        driver=Driver(read_release(root), probe.driver_cuda()),
        device=found,
        numa=read_numa(root, None if found.gpu is None else found.gpu.pci_address),
        numactl=shutil.which("numactl") is not None,
        memlock_bytes=read_memlock(),
        host=host,
        disk=None if state_dir is None else read_disk(state_dir),
        versions=read_versions(),
    )
    weights = [] if weights_dir is None else check_weights(weights_dir)
    return Report.of(device, [*judge(requested, device, facts), *weights], facts)


def judge(requested: str, device: str, facts: Facts) -> list[Finding]:
    """What applies to the device, in the order of the report; what cannot be known of a missing one is left out."""
    found = facts.device
    findings = []
    if device == "cpu":
        findings.append(check_cpu(requested, facts.cpu, facts.torch, facts.nvidia_cards))
    else:
        findings.append(check_gpu(device, facts.torch, found.gpu, found.problem))
    if device != "cpu" or facts.nvidia_cards:
        findings.append(check_driver(facts.driver, facts.torch.cuda))
    if found.gpu is not None:
        findings.append(check_capability(found.gpu, facts.torch.architectures))
    if device == "cpu" or found.gpu is not None:
        findings.append(check_numa(facts.numa, device, numactl=facts.numactl))
        findings.append(check_memlock(facts.memlock_bytes, found.pinned, facts.host.total_bytes))
        if found.pinned is not None:
            findings += [check_pinned(found.pinned), check_link(found.link)]
        if found.pinned is None or found.pinned.problem is None:
            findings += check_copies(found.copies, found.copies_problem, found.link)
        findings.append(check_device_memory(found.gpu))
    return [
        *findings,
        check_host_memory(facts.host),
        check_disk(facts.disk),
        *check_versions(facts.versions, facts.torch.cuda, device),
    ]


def diagnose(settings: Settings, *, reads_weights: bool, looks_at_model: bool, as_json: bool) -> int:
    """Examine this machine, the copies of streamed weights and the model if that is wanted, and print the report;
    returns the exit status, 1 if anything is an error.
    """
    state_dir = None if settings.state_dir is None else settings.state_dir.expanduser()
    weights_dir = settings.engine().weights_dir if reads_weights else None
    report = examine(settings.device, state_dir, MachineProbe(), weights_dir=weights_dir)
    if looks_at_model:
        report = Report.of(report.device, [*report.findings, check_model(settings)], report.facts)
    if as_json:
        print(report.to_json())
    else:
        report.print(Console())
    return 1 if report.status is Status.ERROR else 0
