"""Tests of a service's configuration: defaults, file, environment, and what stops the start."""

from pathlib import Path
from typing import Annotated

import pytest
from msgspec import Meta, Struct, field

from shared.errors import ConfigError
from shared.process.configuration import load, without_secrets
from shared.vocabulary import Slo


class PlannerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str = "nats://127.0.0.1:4222"
    token_budget: Annotated[int, Meta(gt=0)] = 512
    drain_s: float = 5.0
    eager: bool = False
    replica: str | None = None
    tiers: dict[str, Slo] = field(default_factory=dict)
    pools: list[str] = field(default_factory=list)


class WorkerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    replica: str
    low_s: float = 1.0
    high_s: float = 2.0

    def __post_init__(self) -> None:
        if self.low_s > self.high_s:
            raise ValueError("low_s must not exceed high_s")


def toml(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "slackline.toml"
    path.write_text(text)
    return {"SLACKLINE_CONFIG": str(path)}


def test_without_file_and_environment_the_defaults_hold() -> None:
    assert load(PlannerConfig, "planner", {}) == PlannerConfig()


def test_the_environment_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    env = toml(tmp_path, "[planner]\ntoken_budget = 256\ndrain_s = 9\n[worker]\nreplica = 'r9'\n")
    assert load(
        PlannerConfig, "planner", env | {"SLACKLINE_PLANNER_TOKEN_BUDGET": "128"}
    ) == PlannerConfig(token_budget=128, drain_s=9.0)


def test_an_empty_url_in_the_environment_counts_as_unset(tmp_path: Path) -> None:
    empty = {"SLACKLINE_URL": "", "SLACKLINE_PLANNER_URL": ""}
    assert load(PlannerConfig, "planner", empty).url == "nats://127.0.0.1:4222"
    file = toml(tmp_path, "url = 'nats://a:1'\n")
    assert load(PlannerConfig, "planner", file | empty).url == "nats://a:1"


def test_environment_values_take_their_fields_types() -> None:
    env = {
        "SLACKLINE_PLANNER_DRAIN_S": "2",
        "SLACKLINE_PLANNER_EAGER": "true",
        "SLACKLINE_PLANNER_REPLICA": "17",
        "SLACKLINE_PLANNER_TIERS": '{"chat": {"ttft_s": 1.0}}',
        "SLACKLINE_PLANNER_POOLS": '["lp", "hp"]',
        "SLACKLINE_WORKER_REPLICA": "not ours",
        "SLACKLINE_LOG_LEVEL": "debug",
    }
    seen = load(PlannerConfig, "planner", env)
    assert seen == PlannerConfig(
        drain_s=2.0, eager=True, replica="17", tiers={"chat": Slo(ttft_s=1.0)}, pools=["lp", "hp"]
    )


@pytest.mark.parametrize(
    ("text", "env", "parts"),
    [
        (
            "[planner]\ntoken_budgets = 1\n",
            {},
            ["token_budgets", "[planner]", "token_budget", "drain_s"],
        ),
        ("[planer]\ntoken_budget = 1\n", {}, ["planer", "planner", "worker"]),
        ("urls = 'x'\n", {}, ["urls", "url"]),
        ("planner = 3\n", {}, ["planner", "section"]),
        ("[planner]\ntoken_budget = 'many'\n", {}, ["planner.token_budget", "int"]),
        ("[planner]\ntoken_budget = 0\n", {}, ["planner.token_budget", "1"]),
        ("[planner.tiers.chat]\nttft = 1.0\n", {}, ["planner.tiers", "ttft"]),
        ("[planner\n", {}, ["the configuration ", "slackline.toml cannot be read"]),
        (
            "",
            {"SLACKLINE_PLANNER_BUDGET": "1"},
            ["SLACKLINE_PLANNER_BUDGET", "budget", "token_budget"],
        ),
        (
            "",
            {"SLACKLINE_PLANNER_TOKEN_BUDGET": "many"},
            ["SLACKLINE_PLANNER_TOKEN_BUDGET", "many"],
        ),
        ("", {"SLACKLINE_PLANNER_TOKEN_BUDGET": "-1"}, ["SLACKLINE_PLANNER_TOKEN_BUDGET"]),
        ("", {"SLACKLINE_PLANNER_TIERS": "{chat"}, ["SLACKLINE_PLANNER_TIERS", "{chat"]),
    ],
)
def test_a_wrong_setting_stops_the_start_and_the_error_names_it(
    tmp_path: Path, text: str, env: dict[str, str], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(PlannerConfig, "planner", toml(tmp_path, text) | env)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_missing_file_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere/slackline\.toml"):
        load(PlannerConfig, "planner", {"SLACKLINE_CONFIG": "/nowhere/slackline.toml"})


def test_a_required_setting_that_is_missing_says_where_to_set_it() -> None:
    with pytest.raises(ConfigError, match="SLACKLINE_WORKER_REPLICA"):
        load(WorkerConfig, "worker", {})


def test_passwords_do_not_reach_the_log() -> None:
    plain = without_secrets(PlannerConfig(url="nats://user:secret@host:4222"))
    assert plain["url"] == "nats://***@host:4222"
    assert "secret" not in repr(plain)
