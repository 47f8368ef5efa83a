"""Tests of the file of HTTP keys: what it holds, and the error that a wrong line gives."""

from pathlib import Path

import pytest

from shared.errors import ConfigError, PeerError
from shared.rules import http_keys


def test_a_key_is_its_tenants_and_only_its_hash_is_stored(tmp_path: Path) -> None:
    acme, acme_too, other = (http_keys.new_key() for _ in range(3))
    file = tmp_path / "keys"
    lines = [http_keys.line_of(*pair) for pair in (("acme", acme), ("b", other))]
    file.write_text(f"# keys of 2026\n\n{''.join(lines)}{http_keys.line_of('acme', acme_too)}")
    keys = http_keys.read(file)
    assert [keys.tenant_of(key) for key in (acme, acme_too, other)] == ["acme", "acme", "b"]
    assert keys.tenant_of(http_keys.new_key()) is None
    assert keys.tenant_of("") is None
    assert keys.tenant_of("k\ud800\x00é") is None
    assert not any(key in file.read_text() for key in (acme, acme_too, other))
    # the stored hash is no key
    assert keys.tenant_of(lines[0].split()[1]) is None


def test_a_key_has_256_bits() -> None:
    keys = {http_keys.new_key() for _ in range(100)}
    assert len(keys) == 100
    assert {len(key) for key in keys} == {len("sk-") + 43}  # 43 digits of 6 bits


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no key: slackline key"),
        ("# nothing\n", "has no key"),
        (f"acme {64 * 'a'}\nacme sk-plain\n", "line 2: a line is a tenant and the SHA-256"),
        (f"a.b {64 * 'a'}\n", "line 1: tenant must be"),
        (f"acme {64 * 'A'}\n", "line 1"),
        (f"acme {64 * 'a'}\nb {64 * 'a'}\n", "line 2: the key is also acme's"),
    ],
)
def test_a_wrong_file_stops_the_start_and_says_where(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        http_keys.read(file)


def test_an_absent_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        http_keys.read(tmp_path / "keys")


def test_a_tenant_that_could_not_be_part_of_a_subject_gets_no_key() -> None:
    with pytest.raises(PeerError):
        http_keys.line_of("a b", http_keys.new_key())
