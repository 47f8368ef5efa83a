"""Tests of the folder of a fleet's NATS keys: made once, never shown, and revoked for good."""

import asyncio
import os
import signal
import stat
from pathlib import Path

import pytest

from loadgen.cli.main import main
from loadgen.fleet import certificates
from loadgen.fleet.key_folder import HOSTS, Keys
from loadgen.fleet.nats_server import NatsServer
from shared.bus.nats import connect
from shared.bus.nkey import login_of
from shared.bus.users import GATEWAY, OPERATOR, Role, User
from shared.errors import BusError, ConfigError
from shared.schemas import Attach

ACME, OTHER = User(Role.TENANT, "acme"), User(Role.TENANT, "other")
WORKER = User(Role.WORKER, "r1")


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_command_makes_what_is_missing_and_shows_no_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"
    assert main(["keys", str(folder), "--workers", "r1", "--tenants", "acme"]) == 0
    made = files(folder)
    seeds = {path: text.decode().strip() for path, text in made.items() if path.name == "user.nk"}
    assert {str(path.parent.relative_to(folder)) for path in seeds} == {
        *("operator", "gateway", "admission", "planner", "relegation"),
        *("worker/r1", "tenant/acme"),
    }
    assert len(set(seeds.values())) == len(seeds)
    assert main(["keys", str(folder), "--workers", "r1,r2", "--tenants", "acme,other"]) == 0
    later = files(folder)
    kept = {
        path for path in made if path.parent.name != "server" or path.suffix in (".pem", ".key")
    }
    assert all(later[path] == made[path] for path in kept)
    assert {path.parent.name for path in later.keys() - made.keys()} == {"r2", "other"}
    shown = "".join(capsys.readouterr())
    assert "new keys: operator" in shown
    assert "new keys: worker.r2, tenant.other" in shown
    server = (folder / "server" / "nats.conf").read_text() + (
        folder / "server/users.json"
    ).read_text()
    for text in later.values():
        if text.startswith(b"SU"):
            assert text.decode().strip() not in shown + server


def test_everything_is_for_its_owner_alone(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys")
    keys.add([ACME])
    for path in keys.folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_seed_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    keys.add([ACME])
    seed = keys.creds(ACME).read_bytes()
    (tmp_path / "server" / "users.json").unlink()  # the operator's mistake
    with pytest.raises(ConfigError, match="is not overwritten"):
        keys.add([ACME])
    assert keys.creds(ACME).read_bytes() == seed


def test_a_seed_that_was_taken_away_still_lets_its_user_in(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    keys.add([ACME])
    public = keys.users()[ACME]
    keys.creds(ACME).unlink()
    assert keys.add([ACME, OTHER]) == [OTHER]
    assert keys.users()[ACME] == public
    assert public in keys.server_conf.read_text()


def test_the_certificate_is_made_anew_for_another_host_alone(tmp_path: Path) -> None:
    keys, certificate = Keys(tmp_path), tmp_path / "server" / "server.pem"
    keys.add([])
    first = certificate.read_bytes()
    keys.add([ACME])
    assert certificate.read_bytes() == first
    keys.add([], [*HOSTS, "nats.example", "10.0.0.1"])
    assert certificate.read_bytes() != first


def test_a_certificate_near_its_end_is_made_anew_with_the_hosts_it_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Keys(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(certificates, "SERVER_DAYS", certificates.RENEW_DAYS - 1)
        keys.add([], [*HOSTS, "nats.example", "10.0.0.1"])
    assert main(["keys", str(tmp_path)]) == 0
    renewed = keys.server_certificate.read_bytes()
    assert set(certificates.hosts_of(renewed)) == {*HOSTS, "nats.example", "10.0.0.1"}
    told = f"the server's certificate is valid for {certificates.SERVER_DAYS - 1} days"
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tenants", "a.b"),
        ("--tenants", "*"),
        ("--workers", "r/1"),
        ("--revoke",),
        ("--revoke", "--tenants", "nobody"),
        ("--revoke", "--services", "worker"),
        ("--services", "gateway"),
    ],
)
def test_a_mistake_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert main(["keys", str(tmp_path / "keys"), *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_revoked_service_gets_a_new_key_and_the_old_one_is_known_no_more(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    assert main(["keys", str(tmp_path), "--tenants", "acme"]) == 0
    before = keys.users()
    assert main(["keys", str(tmp_path), "--revoke", "--services", "gateway"]) == 0
    assert before[GATEWAY] not in keys.server_conf.read_text()
    assert not keys.creds(GATEWAY).exists()
    assert main(["keys", str(tmp_path)]) == 0
    after = keys.users()
    assert {user for user in before if before[user] != after[user]} == {GATEWAY}
    assert after[GATEWAY] in keys.server_conf.read_text()


def test_a_renewed_user_is_let_in_with_both_keys_until_the_earlier_one_is_forgotten(
    tmp_path: Path,
) -> None:
    keys = Keys(tmp_path)
    keys.add([ACME])
    first = keys.users()
    keys.renew([ACME])
    assert keys.add([ACME]) == [ACME]
    second = keys.users()
    assert {user for user in first if first[user] != second[user]} == {ACME}
    assert login_of(keys.creds(ACME).read_bytes()).public == second[ACME]
    assert all(key in keys.server_conf.read_text() for key in (first[ACME], second[ACME]))
    keys.add([OTHER])
    assert first[ACME] in keys.server_conf.read_text()
    keys.forget()
    assert first[ACME] not in keys.server_conf.read_text()
    assert second[ACME] in keys.server_conf.read_text()
    keys.renew([ACME])
    keys.add([ACME])
    keys.revoke([ACME])
    assert second[ACME] not in keys.server_conf.read_text()
    with pytest.raises(ConfigError):
        keys.renew([ACME])


async def test_a_server_that_runs_lets_a_new_tenant_in_and_throws_a_revoked_one_out(
    tmp_path: Path,
) -> None:
    keys, server = Keys(tmp_path / "keys"), NatsServer(include=tmp_path / "keys/server/nats.conf")
    keys.add([ACME, WORKER])
    url = server.start(tmp_path / "nats")

    async def comes_in(user: User) -> bool:
        creds, tls_ca = str(keys.creds(user)), str(keys.tls_ca(OPERATOR))
        try:
            async with connect(url, "x", user, creds=creds, tls_ca=tls_ca, connect_s=2.0) as bus:
                await bus.flush(2.0)
        except (ConfigError, BusError):  # a server that reads its keys anew may not answer
            return False
        return True

    def reload() -> None:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGHUP)

    try:
        assert await comes_in(ACME)
        keys.add([OTHER])
        reload()
        async with asyncio.timeout(30.0):
            while not await comes_in(OTHER):
                await asyncio.sleep(0.05)
        creds = keys.creds(ACME).read_bytes()
        async with connect(
            url, "x", ACME, creds=str(keys.creds(ACME)), tls_ca=str(keys.tls_ca(ACME))
        ) as bus:
            await bus.subscribe("slo.v1.stream.acme.1", Attach, lambda msg, call: None)
            keys.revoke([ACME])
            keys.creds(ACME).parent.mkdir()
            keys.creds(ACME).write_bytes(creds)  # it kept its seed
            reload()
            async with asyncio.timeout(30.0):
                while not bus.counters.disconnects:
                    await asyncio.sleep(0.05)
            assert not await comes_in(ACME)
        assert await comes_in(OTHER)
    finally:
        server.stop()
