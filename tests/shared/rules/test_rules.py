"""Tests of the rules in a configuration (tiers, tenants, keys): how they are read, and changed."""

from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.rules.http_keys import line_of, new_key
from shared.rules.rules import Rules, read_rules
from shared.rules.tenants import Tenant
from shared.rules.tiers import DEFAULT, DEMO_3, Tier
from shared.vocabulary import Slo

CHAT = Tier(slo=Slo(ttft_s=1.0))
NIGHTLY = Tier(slo=Slo(ttlt_s=28800))


def test_tiers_are_written_in_the_configuration_or_named() -> None:
    written = read_rules({"chat": CHAT, "nightly": NIGHTLY}, "", "").tiers
    assert (written.default, written.tiers) == ("chat", {"chat": CHAT, "nightly": NIGHTLY})
    assert read_rules({"chat": CHAT, "nightly": NIGHTLY}, "nightly", "").tiers.default == "nightly"
    assert read_rules("", "", "").tiers == DEFAULT
    assert read_rules("demo-3", "", "").tiers == DEMO_3
    last = list(DEMO_3.tiers)[-1]
    assert read_rules("demo-3", last, "").tiers.default == last


@pytest.mark.parametrize(
    ("tiers", "default", "tenants", "fault"),
    [
        ({}, "", "", "at least one tier"),
        ({"chat": CHAT}, "batch", "", "`batch`"),
        ({"chat": Tier(slo=Slo())}, "", "", "without any bound"),
        ({"chat": CHAT, "auto": CHAT}, "", "", "`auto` is taken"),
        ("no-such-set", "", "", "no-such-set"),
        ("", "", "/no/such/file.toml", "/no/such/file.toml"),
        ("", "", {"a b": Tenant()}, "`a b`"),
        ("", "", {"*": Tenant(keys=["0" * 64])}, "a key belongs to one tenant"),
    ],
)
def test_what_is_wrong_is_named(
    tiers: str | dict[str, Tier], default: str, tenants: str | dict[str, Tenant], fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault):
        read_rules(tiers, default, tenants)


def test_keys_are_in_a_file_or_with_their_tenant(tmp_path: Path) -> None:
    first, second = new_key(), new_key()
    file = tmp_path / "keys"
    file.write_text(line_of("acme", first))
    digest = line_of("b", second).split()[1]
    keys = read_rules("", "", {"b": Tenant(keys=[digest])}, str(file)).keys
    assert keys is not None
    assert [keys.tenant_of(key) for key in (first, second, new_key())] == ["acme", "b", None]
    assert read_rules("", "", {"b": Tenant(weight=2.0)}).keys is None
    shared = line_of("b", first).split()[1]
    with pytest.raises(ConfigError, match="is b's and acme's: a key belongs to one tenant"):
        read_rules("", "", {"b": Tenant(keys=[shared])}, str(file))


def test_a_change_is_taken_in_place_and_named() -> None:
    rules = read_rules({"chat": CHAT}, "", "")
    assert rules.take(read_rules({"chat": CHAT}, "", "")) == []
    new = read_rules({"chat": CHAT, "nightly": NIGHTLY}, "", {"acme": Tenant(weight=2.0)})
    assert rules.take(new) == ["tiers", "tenants"]
    assert rules == new


def test_a_gateway_that_had_keys_is_never_opened_by_a_change() -> None:
    with_key = {"acme": Tenant(keys=["0" * 64])}
    rules = read_rules("", "", with_key)
    before = Rules(rules.tiers, rules.tenants, rules.keys)
    with pytest.raises(ConfigError, match="no key is left"):
        rules.take(read_rules({"chat": CHAT}, "", {}))
    assert rules == before
