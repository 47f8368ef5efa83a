"""The compose file starts the fleet it says: every variable it sets is known to the service that reads it."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import Struct

from shared.config import SECTIONS, load

ROOT = Path(__file__).parent.parent
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
FLEET = {name: s for name, s in COMPOSE["services"].items() if "services." in str(s.get("command"))}


def config_of(section: str) -> type[Struct]:
    found: type[Struct] = getattr(importlib.import_module(f"services.{section}.config"), f"{section.title()}Config")
    return found


def default_of(value: str) -> str:
    """What compose puts in place of `${NAME:-default}` where NAME is not set."""
    return value.removesuffix("}").partition(":-")[2] if value.startswith("${") else value


@pytest.mark.parametrize("name", sorted(FLEET))
def test_a_service_starts_from_the_environment_compose_gives_it(name: str) -> None:
    section = FLEET[name]["command"][0].removeprefix("services.")
    env = {key: default_of(value) for key, value in FLEET[name]["environment"].items()}
    config: Any = load(config_of(section), section, env)
    assert config.url == "nats://nats:4222"


def test_the_fleet_has_every_service_and_two_replicas() -> None:
    commands = [s["command"][0].removeprefix("services.") for s in FLEET.values()]
    assert set(commands) == set(SECTIONS)
    replicas = [s["environment"].get("SLACKLINE_WORKER_REPLICA") for s in FLEET.values()]
    assert sorted(r for r in replicas if r) == ["r1", "r2"]


def test_everything_that_is_mounted_is_here() -> None:
    mounts = [v.split(":")[0] for s in COMPOSE["services"].values() for v in s.get("volumes", [])]
    assert [m for m in mounts if m.startswith("./") and not (ROOT / m).is_file()] == []


def test_the_broker_has_what_services_ask_of_it() -> None:
    text = (ROOT / "infra" / "nats" / "nats-server.conf").read_text()
    assert "max_payload: 8MB" in text
    assert "store_dir: /data" in text
    assert "jetstream:/data" in COMPOSE["services"]["nats"]["volumes"]
