"""The file of tenants: what it may say, and what is said of its mistakes."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from app.domain.errors import FieldOutOfRange
from app.domain.limits import Limits
from app.tenants.file import read_tenants
from app.tenants.tenant import Role
from tests.tenants.tenant_files import key, tenant, write_tenants

SHA = "0123456789abcdef" * 4


def test_a_file_in_yaml(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(f"""
tenants:
  - name: acme
    role: operator
    keys:
      - sha256: {SHA}
        not_before: 2027-01-01
        not_after: 2027-01-31
    limits:
      requests_per_minute: 60
""")
    (found,) = read_tenants(file)
    assert (found.name, found.role, found.limits) == ("acme", Role.OPERATOR, Limits(requests_per_minute=60))
    assert found.keys[0].not_before == datetime(2027, 1, 1, tzinfo=UTC).timestamp()
    assert found.keys[0].not_after == datetime(2027, 2, 1, tzinfo=UTC).timestamp()  # the day is part of it


def test_a_key_may_end_at_a_time_of_the_day(tmp_path: Path) -> None:
    evening = datetime(2027, 1, 31, 18, tzinfo=UTC).timestamp()
    moments = dict.fromkeys(("2027-01-31T19:00:00+01:00", "2027-01-31T18:00:00"), evening)
    for moment, last in {**moments, "9999-12-31": datetime(9999, 12, 31, tzinfo=UTC).timestamp() + 86_400}.items():
        file = write_tenants(tmp_path / "tenants.json", tenant("acme", key("a", not_after=moment)))
        assert read_tenants(file)[0].keys[0].not_after == last


def test_a_key_in_the_place_of_its_digest_is_not_repeated(tmp_path: Path) -> None:
    secret = "djinn-" + "s" * 43
    file = write_tenants(tmp_path / "tenants.json", tenant("acme", {"sha256": secret}))
    with pytest.raises(FieldOutOfRange, match=r"tenants\.0\.keys\.0\.sha256: 64 lowercase") as refused:
        read_tenants(file)
    assert secret not in refused.value.message


@pytest.mark.parametrize(
    ("tenants", "says"),
    [
        ([{"name": "acme"}], "tenants.0.keys: required"),
        ([tenant("a"), {**tenant("b"), "name": "b c"}], "tenants.1.name: "),
        ([tenant("a", {"sha256": SHA, "until": "x"})], "tenants.0.keys.0.until: unknown field"),
        ([tenant("a", key("a", not_after="soon"))], "tenants.0.keys.0.not_after: a date such as 2027-01-31"),
        ([tenant("a", key("a", not_before="2027-02-01", not_after="2027-01-01"))], "tenants.0.keys.0.not_after: must"),
        ([tenant("a", role="root")], "tenants.0.role: 'user', 'operator' or 'metrics'; got 'root'"),
        ([tenant("a", session=1)], "tenants.0.limits.session: unknown field"),
        ([tenant("a"), tenant("a", key("b"))], "tenants.1.name: the same as tenants.0.name"),
        ([tenant("a"), tenant("b", key("a"))], "tenants.1.keys.0.sha256: the same as tenants.0.keys.0.sha256"),
    ],
)
def test_a_mistake_is_named_by_its_path(tmp_path: Path, tenants: list[dict[str, Any]], says: str) -> None:
    file = write_tenants(tmp_path / "tenants.json", *tenants)
    with pytest.raises(FieldOutOfRange) as refused:
        read_tenants(file)
    assert f"{file}: {says}" in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tenants: [", "invalid YAML, line 1"),
        ("tenants: []\ntenants: []\n", "invalid YAML, line 2, column 1: tenants is there twice"),
        ("just words", "the file must be an object"),
        ("tenants: [{keys: [{not_after: 2027-02-30}]}]", "invalid YAML, line 1, column 31: day"),
        ("? [tenants]\n: []\n", "invalid YAML, line 1, column 3: a field must have a name"),
        ("deep", "invalid YAML"),
        ("tenants: !!python/object/apply:os.getcwd []", "invalid YAML"),
        ("tenants: [{keys: [{not_after: !!timestamp soon}]}]", "invalid YAML"),
    ],
)
def test_a_file_that_is_no_object(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("[" * 10_000 if text == "deep" else text)
    with pytest.raises(FieldOutOfRange, match=says) as refused:
        read_tenants(file)
    assert "\n" not in refused.value.message


def test_tenants_may_share_their_limits(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(f"""
tenants:
  - {{name: one, keys: [{{sha256: {SHA}}}], limits: &usual {{sessions: 5, turns_at_once: 2}}}}
  - {{name: two, keys: [], limits: *usual}}
  - {{name: three, keys: [], limits: {{<<: *usual, turns_at_once: 4}}}}
""")
    limits = [found.limits for found in read_tenants(file)]
    assert limits == [Limits(sessions=5, turns_at_once=turns) for turns in (2, 2, 4)]


@pytest.mark.timeout(20)
def test_a_file_without_end_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    with pytest.raises(FieldOutOfRange, match="No such file"):
        read_tenants(file)
    for text, says in (("&a [*a]", "with its anchors"), (" " * (5 << 20), "more than 4 MiB")):
        file.write_text(f"tenants: {text}")
        with pytest.raises(FieldOutOfRange, match=says):
            read_tenants(file)
    for line in ("{0}: &a{0} {{<<: [{1}], k{0}: 1}}", "{0}: &a{0} [{1}]"):  # a short one that grows
        lines = ["0: &a0 {k0: 1}", *(line.format(n, ", ".join([f"*a{n - 1}"] * 10)) for n in range(1, 30))]
        file.write_text("\n".join([*lines, "tenants: *a29"]))
        with pytest.raises(FieldOutOfRange, match=r"with its anchors the file has [0-9]+ values; 1048576 are allowed"):
            read_tenants(file)
