"""What `djinn doctor` does."""

from pathlib import Path

from rich.console import Console

from app.doctor.examination import examine
from app.doctor.findings import Status
from app.doctor.probe import MachineProbe

FOUND_ERRORS = 1


def diagnose(device: str, state_dir: Path | None, weights_dir: Path | None, *, as_json: bool) -> int:
    """Examine this machine, and the copies of weights in `weights_dir` if it is given, and print the report; returns
    the exit status, 1 if anything is an error.
    """
    report = examine(device, state_dir, MachineProbe(), weights_dir=weights_dir)
    if as_json:
        print(report.to_json())
    else:
        report.print(Console())
    return FOUND_ERRORS if report.status is Status.ERROR else 0
