"""What a server does because it is one of a cluster."""

from __future__ import annotations

import httpx

from app.cluster.load import HEADER, Load
from app.domain.session_ids import home_of_response
from tests.serving import serve


def test_a_replica_tells_how_busy_it_is_and_its_responses_name_it() -> None:
    with serve(replica="a") as url, httpx.Client(base_url=url, timeout=60) as http:
        load = Load.of(http.get("/ready").headers[HEADER])
        assert load == Load(kv_free=1.0, turns=0, host_free=1.0)
        session = http.post("/v1/sessions", json={}).json()["id"]
        turn = {"token_ids": list(range(1, 200)), "max_tokens": 1}
        http.post(f"/v1/sessions/{session}/generate", json=turn).raise_for_status()
        busier = Load.of(http.get("/ready").headers[HEADER])
        assert busier is not None
        assert busier.kv_free < 1
        made = http.post("/v1/responses", json={"model": "tiny-llama", "input": "hi", "max_output_tokens": 1}).json()
        assert home_of_response(made["id"]) == "a"
        assert len(http.get(f"/v1/sessions?after=ses_a_{'0' * 36}").json()["data"]) == 2
        # The list of a cluster has others' sessions, and a page may begin behind one of them.
        assert http.get(f"/v1/sessions?after=ses_b_{'0' * 36}").json() == {"data": [], "has_more": False}
        assert http.get("/v1/sessions?after=nonsense").status_code == 422


def test_a_server_alone_tells_nobody(server_url: str) -> None:
    assert HEADER not in httpx.get(f"{server_url}/ready").headers
    assert httpx.get(f"{server_url}/v1/sessions?after=ses_{'0' * 36}").status_code == 422
