"""The changelog has the form that tools and readers of such files know."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

from packaging.version import Version

TEXT = (Path(__file__).parents[2] / "CHANGELOG.md").read_text("utf-8")
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_it_begins_with_what_is_not_released_and_goes_back_in_time() -> None:
    first, *released = re.findall(r"^## (.+)$", TEXT, re.MULTILINE)
    assert first == "[Unreleased]"
    found = [re.fullmatch(r"\[([\d.]+)\] - (\d{4}-\d\d-\d\d)", heading) for heading in released]
    assert None not in found, released
    versions = [(Version(each[1]), date.fromisoformat(each[2])) for each in found if each is not None]
    assert versions == sorted(versions, reverse=True)


def test_changes_are_of_the_known_kinds() -> None:
    kinds = re.findall(r"^### (.+)$", TEXT, re.MULTILINE)
    assert kinds
    assert set(kinds) <= KINDS
