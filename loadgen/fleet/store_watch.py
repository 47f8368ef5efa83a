"""Heals a nats-server after a full disk. A stream whose write failed takes no writes any more, even
with room again, until the server is started anew; nothing that it has confirmed is lost.
"""

import asyncio
import shutil
from pathlib import Path

import httpx

from loadgen.fleet.child import Child, Say

WATCH_S = 1.0
ROOM_BYTES = 16 * 1024 * 1024  # two blocks of a stream
STOP_S = 15.0  # for the server


async def keep_writable(server: Child, monitor_url: str, store: Path, say: Say) -> None:
    """Start the server again whenever a write has failed and the disk has room; until cancelled."""
    broken = False
    async with httpx.AsyncClient(base_url=monitor_url, trust_env=False) as http:
        while True:
            await asyncio.sleep(WATCH_S)
            before, broken = broken, await _is_broken(http)
            if broken and shutil.disk_usage(store).free >= ROOM_BYTES:
                say(f"{server.name} could not write; {store} has room again: it is started anew")
                await server.restart(STOP_S)
            elif broken and not before:
                say(f"{server.name} cannot write: {store} is full; it goes on once there is room")


async def _is_broken(http: httpx.AsyncClient) -> bool:
    """Tells whether a stream's write has failed. A server that does not answer is no sign of it."""
    try:
        answer = await http.get("/healthz")
    except httpx.HTTPError:
        return False
    return not answer.is_success and "write error" in answer.text
