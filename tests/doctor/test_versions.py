from __future__ import annotations

import platform
from dataclasses import replace
from importlib.metadata import version

import pytest

from app.doctor.findings import Finding, Status
from app.doctor.versions import Package, Versions, check_versions, read_versions

GOOD = Versions(
    "3.12.3",
    None,
    {
        "torch": Package("2.11.0+cu130", None),
        "triton": Package("3.6.0", "==3.6.0"),
        "transformers": Package("5.17.0", "<6,>=5.17"),
    },
)


def find(name: str, versions: Versions, device: str = "cuda:0") -> Finding:
    return next(finding for finding in check_versions(versions, "13.0", device) if finding.name == name)


def test_versions_are_those_that_are_installed() -> None:
    versions = read_versions()
    assert versions.python == platform.python_version()
    assert versions.djinn == version("djinn")
    assert versions.packages["torch"] == Package(version("torch"), "<3,>=2.11")
    assert versions.packages["transformers"].installed == version("transformers")


def test_versions_that_fit_are_well_also_when_djinn_runs_from_source() -> None:
    findings = check_versions(GOOD, "13.0", "cuda:0")
    assert [(finding.name, finding.status, finding.summary) for finding in findings] == [
        ("python", Status.OK, "3.12.3, Djinn from source"),
        ("torch", Status.OK, "2.11.0+cu130, for CUDA 13.0"),
        ("triton", Status.OK, "3.6.0"),
        ("transformers", Status.OK, "5.17.0"),
    ]


@pytest.mark.parametrize(
    ("name", "package", "remedy"),
    [
        ("transformers", Package(None, "<6,>=5.17"), "pip install 'transformers<6,>=5.17'"),
        ("transformers", Package("4.57.0", "<6,>=5.17"), "pip install 'transformers<6,>=5.17'"),
        ("torch", Package("2.10.0+cu130", "<3,>=2.11"), "pip install 'torch<3,>=2.11'"),
        ("triton", Package("3.5.0", "==3.6.0"), "pip install 'triton==3.6.0'"),
        ("triton", Package(None, None), "pip install 'triton'"),
    ],
)
def test_a_package_that_is_missing_or_does_not_fit_comes_with_its_installation(
    name: str, package: Package, remedy: str
) -> None:
    finding = find(name, replace(GOOD, packages={**GOOD.packages, name: package}))
    assert finding.status is Status.ERROR
    assert finding.remedy == remedy


def test_a_cpu_needs_no_triton() -> None:
    without = replace(GOOD, packages={**GOOD.packages, "triton": Package(None, None)})
    assert find("triton", without, device="cpu").status is Status.OK
