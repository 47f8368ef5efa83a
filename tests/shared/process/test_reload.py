"""Tests that a running service takes a changed configuration over, once it is whole and right."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from structlog.testing import capture_logs

from shared.errors import ConfigError
from shared.process.configuration import load
from shared.process.reload import LOOK_S, follow_files, rules_of
from shared.rules.model_names import Aliases
from shared.rules.rules import Rules, TenantSource, TierSource
from tests.simulated.virtual_loop import VirtualTimeLoop

BEFORE = "[tiers.chat]\nslo = {ttft_s = 1.0}\n"
AFTER = "drain_s = 9\n[tiers.chat]\nslo = {ttft_s = 2.0}\n[tenants.acme]\nweight = 4.0\n"


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tiers: TierSource = ""
    default_tier: str = ""
    tenants: TenantSource = ""
    default_model: str = ""
    aliases: Aliases = {}
    drain_s: float = 1.0


Events = list[dict[str, Any]]
Followed = tuple[Path, Rules, Events]
# read by conftest.py
LOOP_FACTORIES = {"simulated": VirtualTimeLoop}


@pytest.fixture
def text() -> str:
    """The configuration at the start."""
    return BEFORE


@pytest.fixture
async def followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> AsyncIterator[Followed]:
    """The file of a section that is followed, its rules, and what is logged of them."""
    file = tmp_path / "slackline.toml"
    file.write_text(text)
    monkeypatch.setenv("SLACKLINE_CONFIG", str(file))
    cfg = load(Section, "gateway")
    rules = rules_of(cfg)
    with capture_logs() as told:
        following = asyncio.create_task(follow_files("gateway", cfg, rules))
        await asyncio.sleep(0)
        yield file, rules, told
        following.cancel()


async def test_a_change_counts_within_seconds_and_is_told(followed: Followed) -> None:
    file, rules, told = followed
    file.write_text(f"[gateway]\n{AFTER}")
    await asyncio.sleep(3 * LOOK_S)
    assert rules.tiers.tiers["chat"].slo.ttft_s == 2.0
    assert rules.tenants.named("acme").weight == 4.0
    (taken,) = [each for each in told if each["event"] == "config.taken"]
    assert taken["changed"] == ["tiers", "tenants"]
    assert taken["at_the_next_start"] == ["drain_s"]


async def test_a_file_that_is_being_written_is_not_taken_before_it_is_still(
    followed: Followed,
) -> None:
    file, rules, told = followed
    half = BEFORE
    for n in range(6):  # each look finds another file, and each of them would be right
        half += f"[tenants.t{n}]\nweight = 2.0\n"
        file.write_text(half)
        await asyncio.sleep(LOOK_S)
    assert (rules.tenants.tenants, told) == ({}, [])
    await asyncio.sleep(2 * LOOK_S)
    assert len(rules.tenants.tenants) == 6


KEY = f'keys = ["{64 * "a"}"]'
WRONG = {
    "no TOML": "[tiers.chat",
    "no bound": "[tiers.chat]\nslo = {}\n",
    "unknown": "drian_s = 3\n",
    "too deep": f"tenants = {5000 * '['}\n",
    "too deep for a type": f"[tenants.a]\nweight = {300 * '{a = '}1{300 * '}'}\n",
    "too many digits": f"[gateway]\ndrain_s = {5000 * '9'}\n",
    "too large": f"[gateway]\ndrain_s = {400 * '9'}\n",
    "one key of two": f"[tenants.a]\n{KEY}\n[tenants.b]\n{KEY}\n",
    "no UTF-8": "drian\udcff",
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
async def test_a_wrong_file_is_refused_and_the_rules_stay(followed: Followed, wrong: str) -> None:
    file, rules, told = followed
    file.write_bytes(wrong.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError):  # nor does a service start with it, and it says why
        rules_of(load(Section, "gateway"))
    await asyncio.sleep(10 * LOOK_S)
    assert rules.tiers.tiers["chat"].slo.ttft_s == 1.0
    assert [each["event"] for each in told] == ["config.refused"]  # once, not at each look
    file.unlink()
    await asyncio.sleep(3 * LOOK_S)
    assert rules.tiers.tiers["chat"].slo.ttft_s == 1.0
    # with the byte-order mark of some editors
    file.write_text("\ufeff[tiers.chat]\r\nslo = {ttft_s = 3.0}\r\n")
    await asyncio.sleep(3 * LOOK_S)
    assert rules.tiers.tiers["chat"].slo.ttft_s == 3.0


async def test_a_file_that_is_named_later_is_followed_from_then_on(
    followed: Followed, tmp_path: Path
) -> None:
    file, rules, _ = followed
    tenants = tmp_path / "tenants.toml"
    tenants.write_text("[tenants.acme]\nweight = 2.0\n")
    file.write_text(f'tenants = "{tenants}"\n{BEFORE}')
    await asyncio.sleep(3 * LOOK_S)
    assert rules.tenants.named("acme").weight == 2.0
    tenants.write_text("[tenants.acme]\nweight = 30.0\n")
    await asyncio.sleep(3 * LOOK_S)
    assert rules.tenants.named("acme").weight == 30.0


@pytest.mark.parametrize("text", [f"{BEFORE}[tenants.acme]\nkeys = ['{64 * '0'}']\n"])
async def test_a_section_without_keys_of_its_own_takes_tenants_whose_keys_are_gone(
    followed: Followed,
) -> None:
    """Admission has no keys: those of the gateway may be in a file of their own."""
    file, rules, _ = followed
    file.write_text(f"{BEFORE}[tenants.acme]\nweight = 3.0\n")
    await asyncio.sleep(3 * LOOK_S)
    assert rules.tenants.named("acme").weight == 3.0
