"""What `djinn doctor` says of the machine: figures are worth as much as that."""

import json

from app.doctor.examination import examine
from app.doctor.probe import MachineProbe
from benchmarks.gpu_check.context import StageContext


def run(context: StageContext) -> None:
    """Every finding; what speaks against the machine is a note."""
    report = json.loads(examine(context.device, None, MachineProbe()).to_json())
    for finding in report["findings"]:
        context.journal.fact(finding["name"], finding["summary"])
        if finding["remedy"] is not None:
            context.journal.note(f"{finding['status']}: {finding['name']}: {finding['summary']}. {finding['remedy']}")
