"""Tests of the limits of tenants: how they are read from a file, and whom they bind."""

from pathlib import Path

import pytest

from shared.errors import ConfigError, PeerError
from shared.rules.tenants import Tenants, load_tenants
from shared.vocabulary import Slo

GOOD = """
[tenants.acme]
weight = 4.0
tokens_s = 2000
burst_tokens = 20000
importance = 2.0
slo = { ttft_s = 0.5, tbt_s = 0.05 }

[tenants."*"]
tokens_s = 100
"""


def loaded(folder: Path, text: str) -> Tenants:
    path = folder / "tenants.toml"
    path.write_text(text)
    return load_tenants(str(path))


def test_a_tenant_has_its_own_limits_or_those_of_the_others(tmp_path: Path) -> None:
    tenants = loaded(tmp_path, GOOD)
    assert tenants.named("acme").weight == 4.0
    assert tenants.named("somebody").tokens_s == 100
    assert load_tenants("").named("acme").weight == 1.0


def test_an_slo_may_not_be_tighter_than_the_tenant_s(tmp_path: Path) -> None:
    acme = loaded(tmp_path, GOOD).named("acme")
    acme.check_slo(Slo(ttft_s=0.5, tbt_s=0.05))
    acme.check_slo(Slo(ttlt_s=0.1))
    with pytest.raises(PeerError, match=r"tbt_s of 0\.05 s or more, not 0\.03 s"):
        acme.check_slo(Slo(ttft_s=1.0, tbt_s=0.03))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tenants.acme]\nweight = 0", r"weight"),
        ("[tenants.acme]\nwait = 1", r"wait"),
        ('[tenants."a.b"]\nweight = 1', r"a\.b"),
        ("[tenants.acme]\nslo = { ttft_x = 2.0 }", r"in seconds"),
        ("[tenants", r"not proper TOML"),
    ],
)
def test_a_fault_in_the_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        loaded(tmp_path, text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_tenants(str(tmp_path / "none.toml"))


def test_beside_other_tenants_only_the_operator_grants_more_importance_than_the_tier_has(
    tmp_path: Path,
) -> None:
    """One tenant alone may rank its requests as it likes."""
    alone = loaded(tmp_path, "[tenants.acme]\nweight = 2")
    assert alone.most_importance("acme", 0.5) == load_tenants("").most_importance("x", 0.5) > 1e6
    assert alone.most_importance("other", 0.5) == 0.5, "acme is beside it"
    several = loaded(tmp_path, "[tenants.acme]\nimportance = 3\n[tenants.other]\nweight = 2")
    assert several.most_importance("acme", 0.5) == 3.0
    assert several.most_importance("other", 2.0) == 2.0
    others = loaded(tmp_path, '[tenants."*"]\ntokens_s = 500')
    assert others.most_importance("acme", 1.0) == 1.0
