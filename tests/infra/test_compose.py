"""Tests of the compose file, read and not run: each service gets settings that it knows."""

import asyncio
import contextlib
import importlib
import secrets
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import Struct

from loadgen.access import Access
from loadgen.cli.main import main
from loadgen.fleet.key_folder import Keys
from loadgen.fleet.lifeline import bound
from loadgen.fleet.nats_server import find_binary
from loadgen.load.connection import bus_at
from shared.bus.users import OPERATOR, Role, User
from shared.errors import SlacklineError
from shared.process.configuration import SECTIONS, load, load_watched
from shared.process.reload import rules_of
from shared.rules.tiers import DEFAULT

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
CONFIG = ROOT / "infra" / "config" / "slackline.toml"
SERVERS = ["nats", "nats-2", "nats-3"]
NATS = ROOT / "infra" / "nats"
FLEET = {name: s for name, s in COMPOSE["services"].items() if "services." in str(s.get("command"))}


def config_of(section: str) -> type[Struct]:
    found: type[Struct] = getattr(
        importlib.import_module(f"services.{section}.config"), f"{section.title()}Config"
    )
    return found


def default_of(value: str) -> str:
    """The value that compose puts in place of `${NAME:-default}` if NAME is not set."""
    return value.removesuffix("}").partition(":-")[2] if value.startswith("${") else value


@pytest.mark.parametrize("name", sorted(FLEET))
def test_a_service_starts_from_the_environment_compose_gives_it(name: str) -> None:
    section = FLEET[name]["command"][0].removeprefix("services.")
    env = {key: default_of(value) for key, value in FLEET[name]["environment"].items()}
    assert env["SLACKLINE_CONFIG"] == "/config/slackline.toml"
    assert any(
        str(volume).endswith("./infra/config}:/config:ro") for volume in FLEET[name]["volumes"]
    )
    env["SLACKLINE_CONFIG"] = str(CONFIG)
    config: Any = load(config_of(section), section, env)
    assert config.url == "nats://nats:4222"
    assert config.creds == f"/keys/{Keys(Path('/')).creds(OPERATOR).name}"
    assert config.tls_ca == f"/keys/{Keys(Path('/')).tls_ca(OPERATOR).name}"


def test_its_configuration_has_the_default_tiers_and_is_right(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["config", "check", str(CONFIG)]) == 0, capsys.readouterr().err
    env = {"SLACKLINE_CONFIG": str(CONFIG)}
    rules = rules_of(load(config_of("admission"), "admission", env))  # type: ignore[arg-type]
    assert rules.tiers.default == DEFAULT.default
    for name, tier in DEFAULT.tiers.items():
        written = rules.tiers.tiers[name]
        assert (written.slo, written.service_tier, written.wait_s) == (
            tier.slo, tier.service_tier, tier.wait_s,
        )  # fmt: skip


def test_each_profile_has_workers_of_one_engine_with_names_of_their_own() -> None:
    commands = [s["command"][0].removeprefix("services.") for s in FLEET.values()]
    assert set(commands) == set(SECTIONS)
    names = ("SLACKLINE_WORKER_ENGINE", "SLACKLINE_WORKER_REPLICA")
    workers = [
        " ".join([*s["profiles"], *(s["environment"][name] for name in names)])
        for s in FLEET.values()
        if "SLACKLINE_WORKER_REPLICA" in s["environment"]
    ]
    assert sorted(workers) == [
        "sim sim r1", "sim sim r2", "torch torch r1", "torch torch r2", "vllm vllm v1",
    ]  # fmt: skip
    assert all("profiles" not in s for name, s in FLEET.items() if not name.startswith("worker"))


def test_every_replica_has_a_log() -> None:
    streams = COMPOSE["services"]["streams"]["command"]
    replicas = {s["environment"].get("SLACKLINE_WORKER_REPLICA") for s in FLEET.values()} - {None}
    assert set(streams[streams.index("--workers") + 1].split(",")) == replicas


def keys_of(service: str) -> list[str]:
    """The volumes of keys that a service has."""
    volumes = COMPOSE["services"][service].get("volumes", [])
    return [mount.partition(":")[0] for mount in volumes if mount.startswith("keys-")]


@pytest.mark.parametrize("name", [*sorted(FLEET), "streams"])
def test_a_service_has_the_key_of_its_own_user_alone(name: str) -> None:
    section = COMPOSE["services"][name]["command"][0].removeprefix("services.")
    replica = COMPOSE["services"][name]["environment"].get("SLACKLINE_WORKER_REPLICA", "")
    user = User(Role.WORKER, replica) if replica else OPERATOR
    if name in FLEET and not replica:
        user = User(Role(section))
    folder = Keys(Path("/keys")).creds(user).parent
    made = dict(mount.split(":") for mount in COMPOSE["services"]["keys"]["volumes"])
    assert [made[volume] for volume in keys_of(name)] == [str(folder)]
    assert f"{keys_of(name)[0]}:/keys:ro" in COMPOSE["services"][name]["volumes"]


def test_the_keys_are_made_for_every_user_and_the_name_of_the_server() -> None:
    words = shlex.split(COMPOSE["services"]["keys"]["command"][0])
    assert words[:5] == ["python", "-m", "loadgen", "keys", "/keys"]
    assert words[words.index("--hosts") + 1].split(",") == SERVERS
    streams = COMPOSE["services"]["streams"]["command"]
    assert words[words.index("--workers") + 1] == streams[streams.index("--workers") + 1]
    assert all(keys_of(server) == ["keys-server"] for server in SERVERS)


def test_the_broker_reads_the_users_and_certificates(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    keys.add([User(Role.TENANT, "default")])
    (tmp_path / "etc" / "nats").mkdir(parents=True)
    conf = tmp_path / "etc" / "nats" / "nats-server.conf"
    conf.write_bytes((ROOT / "infra" / "nats" / "nats-server.conf").read_bytes())
    checked = [str(find_binary()), "-t", "--config", str(conf)]
    done = subprocess.run(checked, check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
    conf.write_text(conf.read_text().replace("/keys/server", "/keys/elsewhere"))
    assert subprocess.run(checked, check=False, capture_output=True).returncode != 0


def test_the_profile_of_the_cluster_adds_servers_with_a_store_of_their_own() -> None:
    lines = (NATS / "cluster.env").read_text().splitlines()
    chosen = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    assert "cluster" in chosen["COMPOSE_PROFILES"].split(",")
    assert [COMPOSE["services"][name].get("profiles") for name in SERVERS] == [
        None, ["cluster"], ["cluster"],
    ]  # fmt: skip
    assert chosen["SLACKLINE_NATS_URL"] == ",".join(f"nats://{name}:4222" for name in SERVERS)
    assert chosen["SLACKLINE_COPIES"] == str(len(SERVERS))
    stores = [COMPOSE["services"][name]["volumes"][-1] for name in SERVERS]
    assert stores == ["jetstream:/data", "jetstream-2:/data", "jetstream-3:/data"]
    for name in SERVERS:
        service = COMPOSE["services"][name]
        volumes = service["volumes"]
        assert service["command"] == ["--config", "/etc/nats/${SLACKLINE_NATS:-nats-server}.conf"]
        assert f"./infra/nats/{chosen['SLACKLINE_NATS']}.conf:/etc/nats/cluster.conf:ro" in volumes
        assert service["environment"] == {
            "SERVER_NAME": name, "SERVERS": "${SLACKLINE_COPIES:-1}",
        }  # fmt: skip


async def test_a_server_of_the_cluster_may_be_lost(tmp_path: Path) -> None:
    """From the files of compose, with loopback addresses for the names of the containers."""
    network = f"127.{100 + secrets.randbelow(100)}.{secrets.randbelow(256)}"
    hosts = {name: f"{network}.{n}" for n, name in enumerate(SERVERS, 1)}
    keys = Keys(tmp_path / "keys")
    keys.add([], list(hosts.values()))
    url = ",".join(f"nats://{host}:4222" for host in hosts.values())
    access = Access(url, str(keys.creds(OPERATOR)), str(keys.tls_ca(OPERATOR)))
    servers = [started(tmp_path / name, name, hosts, keys) for name in SERVERS]
    try:
        async with asyncio.timeout(60.0), bus_at(access, "test", OPERATOR) as bus:
            while True:
                with contextlib.suppress(SlacklineError):  # until a leader is elected
                    await bus.make_streams(["r1"], len(SERVERS))
                    break
            await bus.requests.create("a.b", b"kept")
            servers[0].kill()
            while True:
                with contextlib.suppress(SlacklineError):  # until another one is elected
                    entry = await bus.requests.get("a.b")
                    assert entry is not None
                    await bus.requests.update("a.b", b"changed", entry.revision)
                    break
    finally:
        for server in servers:
            server.kill()
            server.wait()


def started(folder: Path, name: str, hosts: dict[str, str], keys: Keys) -> subprocess.Popen[bytes]:
    """A server as compose starts it, with `folder` as the root of its container."""
    here = {"0.0.0.0": hosts[name], "/data": str(folder / "data"), '"/keys/': f'"{keys.folder}/'}
    here |= {f"nats://{other}:": f"nats://{host}:" for other, host in hosts.items()}
    (folder / "etc" / "nats").mkdir(parents=True)
    (folder / "keys").symlink_to(keys.folder)
    for file in NATS.glob("*.conf"):
        text = file.read_text()
        for word, instead in here.items():
            text = text.replace(word, instead)
        (folder / "etc" / "nats" / file.name).write_text(text)
    command = [str(find_binary()), "--config", str(folder / "etc" / "nats" / "cluster.conf")]
    return subprocess.Popen(bound(command), env={"SERVER_NAME": name}, stderr=subprocess.DEVNULL)


@pytest.mark.parametrize("name", sorted(set(FLEET) - {"gateway"}))
def test_a_health_check_asks_for_the_service_and_replica_it_stands_beside(name: str) -> None:
    section = FLEET[name]["command"][0].removeprefix("services.")
    replica = FLEET[name]["environment"].get("SLACKLINE_WORKER_REPLICA")
    asked = "requests" if section == "admission" else section  # the name of its endpoint
    wanted = [asked, replica] if replica else [asked]
    assert FLEET[name]["healthcheck"]["test"][3:] == wanted


def test_the_gateway_is_asked_where_it_listens_and_published_where_it_listens() -> None:
    gateway = COMPOSE["services"]["gateway"]
    port = gateway["environment"]["SLACKLINE_GATEWAY_PORT"]
    assert gateway["healthcheck"]["test"][3] == f"http://127.0.0.1:{port}/health"
    assert [mapping.split(":")[-1] for mapping in gateway["ports"]] == [port]


def test_ports_are_published_on_loopback_only_since_the_gateway_goes_without_keys() -> None:
    gateway = COMPOSE["services"]["gateway"]["environment"]
    assert gateway["SLACKLINE_GATEWAY_WITHOUT_KEYS"] == "true"
    mappings = [mapping for s in COMPOSE["services"].values() for mapping in s.get("ports", [])]
    assert [m for m in mappings if not m.startswith("127.0.0.1:")] == []


def test_prometheus_scrapes_every_service_where_it_tells_its_metrics() -> None:
    config = yaml.safe_load((ROOT / "infra" / "prometheus" / "prometheus.yml").read_text())
    static = [
        t
        for job in config["scrape_configs"]
        for group in job.get("static_configs", [])
        for t in group["targets"]
    ]
    found = [
        (name, dns["port"])
        for job in config["scrape_configs"]
        for dns in job.get("dns_sd_configs", [])
        for name in dns["names"]
    ]
    port = {
        name: int(service["environment"]["SLACKLINE_METRICS_PORT"])
        for name, service in FLEET.items()
    }
    assert sorted(found) == sorted((name, port[name]) for name in FLEET if name != "gateway")
    assert f"gateway:{FLEET['gateway']['environment']['SLACKLINE_GATEWAY_PORT']}" in static
    for name in set(FLEET) - {"gateway"}:
        section = FLEET[name]["command"][0].removeprefix("services.")
        env = FLEET[name]["environment"] | {"SLACKLINE_CONFIG": str(CONFIG)}
        watched = load_watched(section, env)
        assert (watched.metrics_host, watched.metrics_port) == ("0.0.0.0", port[name])
