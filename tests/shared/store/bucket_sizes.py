"""Reads and bounds the sizes of a running nats-server's streams, to fill the store in tests."""

import json
from typing import Any

from nats.aio.client import Client


async def asked(client: Client, what: str, payload: object = None) -> dict[str, Any]:
    """JetStream's answer to an operator."""
    data = b"" if payload is None else json.dumps(payload).encode()
    answer: dict[str, Any] = json.loads((await client.request(f"$JS.API.{what}", data)).data)
    assert "error" not in answer, answer
    return answer


async def state_of(client: Client, stream: str) -> dict[str, Any]:
    state: dict[str, Any] = (await asked(client, f"STREAM.INFO.{stream}"))["state"]
    return state


async def resize(client: Client, stream: str, max_bytes: int | None) -> None:
    """Bound the stream; None: to the bytes that it has now."""
    info = await asked(client, f"STREAM.INFO.{stream}")
    settings = info["config"] | {"max_bytes": max_bytes or info["state"]["bytes"]}
    await asked(client, f"STREAM.UPDATE.{stream}", settings)
