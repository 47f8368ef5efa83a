"""Tests of the NATS container's health check, against a real server on a disk that fills."""

import asyncio
import contextlib
import shutil
import subprocess
from pathlib import Path

import nats
import nats.errors
import pytest
from nats.js.api import StreamConfig

from loadgen.fleet.lifeline import bound
from loadgen.fleet.nats_server import find_binary, greets, server_config
from loadgen.fleet.ports import free_port
from tests.fleet.processes import gone, wait_for
from tests.infra.full_disk import small_disk

SCRIPT = Path(__file__).parents[2] / "infra" / "nats" / "health.sh"
WITHIN_S = 60.0


@pytest.mark.skipif(
    shutil.which("wget") is None, reason="the NATS image has wget, this machine not"
)
async def test_a_server_whose_disk_was_full_is_unhealthy_and_ended_once_there_is_room(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        port, monitor = free_port(), f"127.0.0.1:{free_port()}"
        conf = disk.path / "nats-server.conf"
        lines = server_config("127.0.0.1", port, 1 << 20, disk.path / "jetstream")
        conf.write_text("\n".join([*lines, f'http: "{monitor}"']))
        server = await asyncio.create_subprocess_exec(
            *bound([str(find_binary()), "--config", str(conf)]), stderr=subprocess.DEVNULL
        )
        url = f"nats://127.0.0.1:{port}"
        try:
            wait_for(lambda: greets(url), WITHIN_S)

            async def healthy() -> bool:
                call = ["sh", str(SCRIPT), f"http://{monitor}", str(server.pid), str(disk.path)]
                return (await asyncio.to_thread(subprocess.run, call, check=False)).returncode == 0

            client = await nats.connect(url, allow_reconnect=False)
            stream = client.jetstream(timeout=1.0)
            await stream.add_stream(StreamConfig(name="S", subjects=["s"]))
            await stream.publish("s", b"kept")
            assert await healthy()
            disk.fill()
            with contextlib.suppress(nats.errors.TimeoutError):  # at the first that finds no room
                for _ in range(1000):
                    await stream.publish("s", 4096 * b"x")
            assert not await healthy()
            assert not gone(server.pid)
            disk.clear()
            with pytest.raises(nats.errors.TimeoutError):
                await stream.publish("s", b"x")  # the stream does not heal by itself
            assert not await healthy()
            wait_for(lambda: gone(server.pid), WITHIN_S)
            await client.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                server.kill()
            await server.wait()
