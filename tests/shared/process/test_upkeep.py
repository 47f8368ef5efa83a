"""Tests of the look-out of a process: streams that fill and certificates that end, on real NATS."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from loadgen.fleet import certificates
from loadgen.fleet.key_folder import Keys
from loadgen.fleet.nats_server import NatsServer
from shared.bus.nats import NatsBus, connect
from shared.bus.users import OPERATOR, Role, User
from shared.clock import Clock
from shared.process.upkeep import Upkeep
from shared.telemetry import conventions as names
from shared.telemetry.exposition import exposition
from shared.telemetry.instruments import Registry

DAY_S = 86_400.0
WITHIN_S = 60.0
ADMISSION = User(Role.ADMISSION)


class Watch:
    """The look-out on a bus, and its numbers by their label."""

    def __init__(self, bus: NatsBus, tls_ca: str = "") -> None:
        self._registry = Registry()
        self.upkeep = Upkeep(bus, Clock(), self._registry, tls_ca)

    def values(self, name: str) -> dict[str, float]:
        text = exposition([self._registry], "")[1]
        return {
            next(iter(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        }

    def days(self) -> dict[str, float]:
        found = self.values(names.CERTIFICATE_END)
        return {name: round((end - time.time()) / DAY_S, 1) for name, end in found.items()}


async def test_a_certificate_that_ends_is_told_until_the_server_has_read_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Keys(tmp_path / "keys")
    with monkeypatch.context() as patched:
        patched.setattr(certificates, "SERVER_DAYS", 20)
        keys.add([])
    server = NatsServer(include=keys.server_conf)
    url, ca = server.start(tmp_path / "nats"), str(keys.tls_ca(ADMISSION))
    try:
        async with connect(url, "t", creds=str(keys.creds(OPERATOR)), tls_ca=ca) as operator:
            await operator.make_streams(["r0"])
        creds = str(keys.creds(ADMISSION))
        async with connect(url, "t", ADMISSION, creds=creds, tls_ca=ca) as bus:
            watch = Watch(bus, ca)
            with capture_logs() as logs:
                await watch.upkeep.look_at_certificates()
                await watch.upkeep.look_at_certificates()
            assert watch.days() == {"nats": 20.0, "authority": certificates.AUTHORITY_DAYS}
            assert [(line["event"], line["certificate"], line["days"]) for line in logs] == [
                ("certificate.ends", "nats", 20.0)
            ]
            # what docs/operate.md says: `slackline keys` and a SIGHUP; the connection stays
            keys.add([])
            assert server.pid is not None
            os.kill(server.pid, signal.SIGHUP)
            async with asyncio.timeout(WITHIN_S):
                while watch.days()["nats"] == 20.0:
                    await watch.upkeep.look_at_certificates()
            assert watch.days()["nats"] == certificates.SERVER_DAYS
            assert bus.counters.disconnects == 0
            await watch.upkeep.look_at_streams()
            assert watch.values(names.STREAM_LIMIT)["KV_bodies"] == 2 * 1024**3
            assert "OBJ_files" not in watch.values(names.STREAM_LIMIT)  # the gateway's
    finally:
        server.stop()


async def test_the_size_of_a_stream_is_as_its_values_and_without_tls_no_certificate_ends(
    nats_url: str,
) -> None:
    async with connect(nats_url, "t", ADMISSION) as bus:
        watch = Watch(bus)
        await watch.upkeep.look_at_streams()
        before = watch.values(names.STREAM_BYTES)["KV_bodies"]
        await bus.bodies.create("upkeep.1", b"x" * 100_000)
        await watch.upkeep.look_at_streams()
        await watch.upkeep.look_at_certificates()
        assert 100_000 < watch.values(names.STREAM_BYTES)["KV_bodies"] - before < 101_000
        assert watch.days() == {}
