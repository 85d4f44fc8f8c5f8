"""How flags and the environment are read, and which values are refused."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from app.domain.errors import FieldOutOfRange
from app.domain.values import KVBudget
from app.flags import OneLineParser, add_flags, settings_of
from app.settings import Settings


def from_flags(*flags: str) -> Settings:
    parser = OneLineParser()
    add_flags(parser)
    return settings_of(parser.parse_args(flags))


@pytest.mark.parametrize(
    ("text", "size"), [("64MiB", 64 << 20), ("2GiB", 2 << 30), ("1000", 1000), ("1.5KiB", 1536), ("2MB", 2_000_000)]
)
def test_sizes_are_read_with_their_unit(text: str, size: int) -> None:
    settings = from_flags("--kv-device", text, "--max-request-bytes", text)
    assert settings.engine().kv_device == KVBudget(bytes=size)
    assert settings.max_request_bytes == size


def test_kv_can_be_counted_in_sessions_or_left_to_the_server_and_none_is_on_disk_without_a_folder() -> None:
    budget = from_flags("--kv-device", "20x1024").engine().kv_device
    assert budget is not None
    assert budget.blocks(block_bytes=1000, block_size=16) == 20 * 64
    for setting in ("kv_device", "kv_host", "kv_disk"):
        assert getattr(from_flags(f"--{setting.replace('_', '-')}", "auto").engine(), setting) is None
        assert getattr(from_flags().engine(), setting) is None
    for text in ("0x5", "-4", "much", "1x2x3"):
        with pytest.raises(ValidationError, match="neither auto, nor bytes such as 2GiB, nor sessions such as 20x1024"):
            from_flags(f"--kv-host={text}")
    settings = from_flags("--state-dir", "none")
    assert (settings.state_dir, settings.engine().kv_dir) == (None, None)


def test_cuda_graphs_are_asked_for_or_not_or_left_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_flags().engine().cuda_graphs is None
    assert from_flags("--cuda-graphs").engine().cuda_graphs is True
    assert from_flags("--no-cuda-graphs").engine().cuda_graphs is False
    monkeypatch.setenv("DJINN_CUDA_GRAPHS", "false")
    assert from_flags().engine().cuda_graphs is False


def test_servers_of_a_cluster_have_a_lease_and_bind_by_names_alone(tmp_path: Path) -> None:
    (tmp_path / "key").touch()
    cluster = ("--replica", "a", "--cluster", f"folder:{tmp_path}", "--cluster-key-file", str(tmp_path / "key"))
    assert from_flags().lease is None
    assert from_flags("--lease-s", "30").lease == 30
    assert [from_flags(*flags).binds_by_prefix for flags in ((), ("--no-bind-by-prefix",), cluster)] == [
        True,
        False,
        False,
    ]
    assert from_flags(*cluster).lease == 15
    assert from_flags(*cluster, "--lease-s", "0").lease is None
    for wrong in ("0.5", "3601", "-1", "nan"):
        with pytest.raises(ValidationError, match=r"lease_s: 0 for none, or from 1 to 3600"):
            from_flags("--lease-s", wrong)
    with pytest.raises(ValidationError, match="state_dir is none"):
        from_flags("--lease-s", "30", "--state-dir", "none")


def test_keys_come_one_by_one_or_together_and_not_with_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_flags().api_keys == ()
    assert from_flags("--api-key", "a", "--api-key", "b").api_keys == from_flags("--api-keys", "a,b").api_keys
    assert from_flags("--api-keys", "a,b").api_keys == ("a", "b")
    monkeypatch.setenv("DJINN_API_KEY", "secret")
    assert from_flags().api_keys == ("secret",)
    assert from_flags("--api-key", "other").api_keys == ("other",)
    with pytest.raises(FieldOutOfRange) as refused:
        from_flags("--tenants", "tenants.yaml").require_safe_access()
    assert refused.value.param == "tenants"


def test_the_environment_counts_and_a_flag_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DJINN_PORT", "1234")
    monkeypatch.setenv("DJINN_API_KEYS", "x,y")
    assert (from_flags().port, from_flags().api_keys) == (1234, ("x", "y"))
    assert from_flags("--port", "99").port == 99
    monkeypatch.setenv("DJINN_BASE_URL", "http://127.0.0.1:9000")  # the clients', and none of the server's
    assert from_flags().host == "127.0.0.1"
    monkeypatch.setenv("DJINN_PROT", "1234")
    with pytest.raises(ValidationError, match="DJINN_PROT"):
        from_flags()


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--drain-timeout-s", "-1"], "drain_timeout_s"),
        (["--max-connections", "0"], "max_connections"),
        (["--api-key", ""], "api_keys"),
        (["--api-keys", "a,"], "api_keys"),
        *((["--replica", name], "replica") for name in ("", "A", "9a", "a" * 17)),
    ],
)
def test_a_bad_value_names_its_setting(flags: list[str], field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        from_flags(*flags)
    assert refused.value.errors()[0]["loc"][0] == field
