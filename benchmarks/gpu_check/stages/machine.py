"""What `djinn doctor` says of the machine, since figures are worth as much as that; and the tests that need a CUDA
device.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from app.doctor.examination import examine
from app.doctor.probe import MachineProbe
from benchmarks.gpu_check.journal import SkipStage, StageContext
from benchmarks.gpu_check.overlay import ROOT
from loadgen.errors import NotAsMeant
from loadgen.report.tables import Target


def stage_doctor(context: StageContext) -> None:
    """Every finding; what speaks against the machine is a note."""
    report = json.loads(examine(context.device, None, MachineProbe()).to_json())
    for finding in report["findings"]:
        context.journal.fact(finding["name"], finding["summary"])
        if finding["remedy"] is not None:
            context.journal.note(f"{finding['status']}: {finding['name']}: {finding['summary']}. {finding['remedy']}")


MARK = "mark.cuda"
OPTIONS = ("-m", "cuda", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors")
NONE = Target(0.0)
LOG_CHARACTERS = 4000
GRACE_S = 3.0


def stage_cuda_tests(context: StageContext) -> None:
    """pytest on the files that have such a test, and nothing else: others may need packages that are not here."""
    files = find_files()
    if not files:
        raise SkipStage("no test has the mark `cuda`")
    report(context, run_tests(files, ROOT, max(1.0, context.left_s - GRACE_S)))


def run_tests(files: list[str], folder: Path, seconds: float) -> ElementTree.Element:
    """pytest's JUnit report of the marked tests in `files`. Raises `NotAsMeant` if there is none."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "junit.xml"
        command = [sys.executable, "-m", "pytest", *OPTIONS, f"--junitxml={report}", *files]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired as error:
            raise NotAsMeant(f"pytest took longer than {seconds:.0f} s") from error
        said = done.stdout[-LOG_CHARACTERS:] + done.stderr[-LOG_CHARACTERS:]
        print(said)
        if not report.exists():
            raise NotAsMeant(f"pytest wrote no report: {said}")
        return ElementTree.parse(report).getroot()


def find_files() -> list[str]:
    """Those of the checkout with a marked test."""
    tests = (ROOT / "tests").rglob("test_*.py")
    return sorted(str(path.relative_to(ROOT)) for path in tests if MARK in path.read_text("utf-8"))


def report(context: StageContext, suites: ElementTree.Element) -> None:
    """Count how the tests ended, and name those that failed."""
    cases = list(suites.iter("testcase"))
    ends = {kind: [case for case in cases if case.find(kind) is not None] for kind in ("failure", "error", "skipped")}
    bad = [*ends["failure"], *ends["error"]]
    for case in bad:
        context.journal.note(f"Failed: {case.get('classname')}::{case.get('name')}")
    context.journal.value("CUDA tests that passed", "", len(cases) - len(bad) - len(ends["skipped"]))
    context.journal.value("CUDA tests that were skipped", "", len(ends["skipped"]))
    context.journal.value("CUDA tests that failed", "", len(bad), NONE)
