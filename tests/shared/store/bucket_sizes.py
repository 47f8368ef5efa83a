"""Sizes of the buckets of a running nats-server."""

import json
from typing import Any

import nats


async def asked(url: str, what: str, payload: object = None) -> dict[str, Any]:
    """JetStream's answer to an operator."""
    client = await nats.connect(url)
    data = b"" if payload is None else json.dumps(payload).encode()
    answer: dict[str, Any] = json.loads((await client.request(f"$JS.API.{what}", data)).data)
    await client.close()
    assert "error" not in answer, answer
    return answer


async def state_of(url: str, bucket: str) -> dict[str, Any]:
    state: dict[str, Any] = (await asked(url, f"STREAM.INFO.KV_{bucket}"))["state"]
    return state


async def resize(url: str, bucket: str, max_bytes: int | None) -> None:
    """Bound the bucket; None: to the bytes that it has now."""
    info = await asked(url, f"STREAM.INFO.KV_{bucket}")
    settings = info["config"] | {"max_bytes": max_bytes or info["state"]["bytes"]}
    await asked(url, f"STREAM.UPDATE.KV_{bucket}", settings)
