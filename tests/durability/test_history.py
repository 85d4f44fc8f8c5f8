"""What sessions did is told later: after the end of a session, after a restart, and to nobody else."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.sessions.history import FILE
from tests.conftest import ServeWith
from tests.durability.restarting import generate, open_session, serving
from tests.errors import assert_error


def timeline(http: httpx.Client, session: str, **query: int) -> list[dict[str, Any]]:
    answer = http.get(f"/v1/sessions/{session}/timeline", params=query)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["data"]
    return found


def test_a_closed_session_is_remembered_after_a_restart(tmp_path: Path) -> None:
    folder, began = tmp_path / "state", time.time()
    with serving(folder) as http:
        session = open_session(http)
        usage = generate(http, session, [5, 6, 7])["usage"]
        http.post(f"/v1/sessions/{session}/phase", json={"phase": "io_wait", "resume_in_ms": 1})
        time.sleep(0.01)
        generate(http, session, [8])
    with serving(folder) as http:
        http.delete(f"/v1/sessions/{session}")
        told = timeline(http, session)[::-1]
        kinds = [entry["kind"] for entry in told if entry["kind"] != "moved"]
        assert kinds == ["opened", "turn", "phase", "turn", "restored", "closed"]
        first, second = (entry for entry in told if entry["kind"] == "turn")
        assert {name: first[name] for name in usage} == usage
        assert (first["status"], first["late_s"]) == ("finished", None)
        assert second["late_s"] > 0, "it was to be back after a millisecond"
        assert began <= told[0]["at"] <= second["at"] - second["seconds"] <= told[-1]["at"] <= time.time()
        assert timeline(http, session, limit=2, before=told[-1]["id"]) == told[-2:-4:-1]
        activity = http.get("/v1/activity", params={"since": began - 60}).json()
        assert [mark["kind"] for mark in activity["marks"]] == ["started", "stopped", "started"]
        minutes = activity["minutes"]
        assert [sum(each[name] for each in minutes) for name in ("turns", "failed", "late")] == [2, 0, 1]
        assert sum(each["prompt_tokens"] for each in minutes) == first["prompt_tokens"] + second["prompt_tokens"]


@pytest.mark.parametrize("damage", ["garbage", "a folder", "pages"])
def test_a_damaged_history_is_made_anew(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "state" / FILE
    file.parent.mkdir()
    if damage == "garbage":
        file.write_bytes(b"x" * 5000)
    elif damage == "a folder":  # what happens is in memory then
        file.mkdir()
    with serving(tmp_path / "state") as http:
        session = open_session(http)
        assert [entry["kind"] for entry in timeline(http, session)] == ["opened"]
    if damage == "pages":
        with file.open("r+b") as opened:  # it opens: what is wrong shows as it is read
            opened.seek(4096)
            opened.write(b"x" * (file.stat().st_size - 4096))
        with serving(tmp_path / "state") as http:
            assert timeline(http, session) == []
            generate(http, session, [5])
            assert "turn" in [entry["kind"] for entry in timeline(http, session)]


def test_no_tenant_sees_the_history_of_another(serve_with: ServeWith) -> None:
    http = serve_with(api_keys=("sesame", "other"))
    mine, others = ({"authorization": f"Bearer {key}"} for key in ("sesame", "other"))
    session = http.post("/v1/sessions", headers=mine).json()["id"]
    http.post(f"/v1/sessions/{session}/generate", json={"token_ids": [1], "max_tokens": 1}, headers=mine)
    http.delete(f"/v1/sessions/{session}", headers=mine)
    path = f"/v1/sessions/{session}/timeline"
    assert http.get(path, headers=mine).json()["data"][0]["kind"] == "closed"
    assert_error(http.get(path, headers=others), 404, "not_found", param="session_id")
    too_far = http.get(path, params={"before": 1 << 63}, headers=mine)
    assert_error(too_far, 422, "field_out_of_range", param="before")
    seen = [http.get("/v1/activity", headers=each).json()["minutes"] for each in (mine, others)]
    assert ([each["agents"] for each in seen[0]], seen[1]) == ([1], [])
