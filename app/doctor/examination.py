"""The whole examination: facts, and a judgement of each."""

from pathlib import Path

from app.doctor.capability import check_capability
from app.doctor.copies import check_copies
from app.doctor.device import check_cpu, check_gpu, choose_device
from app.doctor.disk import check_disk
from app.doctor.driver import check_driver
from app.doctor.facts import Facts, gather
from app.doctor.findings import Finding
from app.doctor.link import check_link
from app.doctor.memlock import check_memlock, check_pinned
from app.doctor.memory import check_device_memory, check_host_memory
from app.doctor.numa import check_numa
from app.doctor.probe import MachineProbe
from app.doctor.report import Report
from app.doctor.versions import check_versions
from app.doctor.weights import check_weights


def examine(
    requested: str,
    state_dir: Path | None,
    probe: MachineProbe,
    root: Path = Path("/"),
    weights_dir: Path | None = None,
) -> Report:
    """Examine the machine for `--device requested --state-dir state_dir`. Takes a second or two, most of it copying.
    The copies of weights in `weights_dir`, if it is given, are read wholly, which takes minutes for large ones.

    Raises `FieldOutOfRange` if `requested` is not the name of a device, there or not.
    """
    build = probe.build()
    device = choose_device(requested, build.gpu_count)
    facts = gather(device, build, state_dir, probe, root)
    weights = [] if weights_dir is None else check_weights(weights_dir)
    return Report.of(device, [*judge(requested, device, facts), *weights], facts)


def judge(requested: str, device: str, facts: Facts) -> list[Finding]:
    """What applies to the device, in the order of the report; what cannot be known of a missing one is left out."""
    found = facts.device
    on_cpu = device == "cpu"
    findings = [
        check_cpu(requested, facts.cpu, facts.torch, facts.nvidia_cards)
        if on_cpu
        else check_gpu(device, facts.torch, found.gpu, found.problem)
    ]
    if not on_cpu or facts.nvidia_cards:
        findings.append(check_driver(facts.driver, facts.torch.cuda))
    if found.gpu is not None:
        findings.append(check_capability(found.gpu, facts.torch.architectures))
    if on_cpu or found.gpu is not None:
        findings.append(check_numa(facts.numa, device, numactl=facts.numactl))
        findings += _judge_copies(facts)
        findings.append(check_device_memory(found.gpu))
    return [
        *findings,
        check_host_memory(facts.host),
        check_disk(facts.disk),
        *check_versions(facts.versions, facts.torch.cuda, device),
    ]


def _judge_copies(facts: Facts) -> list[Finding]:
    """From what a copy needs to how fast it is."""
    found = facts.device
    findings = [check_memlock(facts.memlock_bytes, found.pinned, facts.host.total_bytes)]
    if found.pinned is not None:
        findings += [check_pinned(found.pinned), check_link(found.link)]
        if found.pinned.problem is not None:
            return findings
    return findings + check_copies(found.copies, found.copies_problem, found.link)
