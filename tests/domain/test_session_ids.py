"""Ids of sessions name their home, and are the log's ids."""

import pytest

from app.domain.session_ids import home_of, home_of_response, new_response_id, new_session_id
from app.logs.about import session_of


@pytest.mark.parametrize("replica", [None, "a", "replica10", "z" * 16])
def test_an_id_names_its_home_and_is_named_by_the_log(replica: str | None) -> None:
    first, second = new_session_id(replica), new_session_id(replica)
    assert home_of(first) == replica
    assert session_of({"path_params": {"session_id": first}}) == first
    assert first < second


@pytest.mark.parametrize("text", ["", "ses_", "ses_A_" + "0" * 36, "ses_a_" + "0" * 35, "ses_a b_" + "0" * 36])
def test_what_is_no_id_has_no_home(text: str) -> None:
    assert home_of(text) is None
    assert session_of({"path_params": {"session_id": text}}) is None


@pytest.mark.parametrize("replica", [None, "a", "z" * 16])
def test_a_response_names_its_home_too(replica: str | None) -> None:
    assert home_of_response(new_response_id(replica)) == replica
    assert home_of_response(new_session_id(replica)) is None
    assert home_of(new_response_id(replica)) is None


@pytest.mark.parametrize("text", ["", "resp_", "resp_A_" + "0" * 32, "resp_a_" + "0" * 31, "resp_a_" + "0" * 33])
def test_what_is_no_id_of_a_response_has_no_home(text: str) -> None:
    assert home_of_response(text) is None
