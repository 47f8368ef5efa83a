"""Boots the chart: its pods run as processes, with three NATS servers, and lose no request while a
server and a worker die, while all of it is replaced, and when it is uninstalled.
"""

import asyncio
import contextlib
import itertools
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import nats.errors
import pytest

from loadgen.cli.main import main
from shared.bus.nats_client import OrderedClient, trusting
from shared.bus.users import Role, User
from tests.infra.helm.chart import ROOT, render
from tests.infra.helm.cluster import Cluster

WITHIN_S = 240.0  # the longest that a busy machine may take for anything
TOKENS = 48
WORKERS = "slackline-worker-sim"
MODELS = ("sim-Llama-3-8B", "sim-Llama-3-8B", "sim-other")
CONFIG = ROOT / "infra" / "config" / "slackline.toml"
VALUES: dict[str, Any] = {
    "models": [
        {
            "name": "sim",
            "engine": "sim",
            "folder": "sim-Llama-3-8B",
            "tokenizer": "slackline-5m",
            "replicas": {"from": 2, "to": 3},
            "resources": {"limits": {"memory": "1Gi"}},
        },
        {
            "name": "other",
            "engine": "sim",
            "folder": "sim-other",
            "tokenizer": "slackline-5m",
            "replicas": {"from": 1, "to": 1},
            "resources": {"limits": {"memory": "1Gi"}},
        },
    ],
    "gateway": {"service": {"port": 8081}},
    "scaling": {"by": "hpa"},
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Load:
    """Streams of clients over HTTP, begun again as they end, until it is stopped."""

    def __init__(self, url: str, key: str) -> None:
        self.served = 0
        self._url, self._headers = url, {"Authorization": f"Bearer {key}"}
        self._models = itertools.cycle(MODELS)
        self._stop = asyncio.Event()

    async def one(self) -> None:
        """One answer, read to its end. Raises AssertionError if anything of it is missing."""
        body = {
            "model": next(self._models),
            "prompt": "What is a river?",
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        # a new connection each time, so that each pod has its turn
        async with (
            httpx.AsyncClient(trust_env=False, timeout=WITHIN_S, headers=self._headers) as http,
            http.stream("POST", f"{self._url}/v1/completions", json=body) as answer,
        ):
            assert answer.status_code == httpx.codes.OK, await answer.aread()
            lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]", lines[-1]
        usage = json.loads(lines[-2][6:])["usage"]
        assert usage["completion_tokens"] == TOKENS, usage
        self.served += 1

    async def _client(self) -> None:
        while not self._stop.is_set():
            await self.one()

    @contextlib.asynccontextmanager
    async def running(self, clients: int) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            for n in range(clients):
                tasks.create_task(self._client(), name=f"client-{n}")
            try:
                yield
            finally:
                self._stop.set()

    async def until_served(self, more: int) -> None:
        wanted = self.served + more
        async with asyncio.timeout(WITHIN_S):
            while self.served < wanted:
                await asyncio.sleep(0.1)


async def test_the_chart_boots_and_loses_no_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    assert main(["key", "default", str(keys)]) == 0
    key = capsys.readouterr().out.strip()
    others = {"slackline-http": {"keys": keys.read_bytes()}}
    async with Cluster(tmp_path / "cluster", render(VALUES), others) as cluster:
        await cluster.until_ready(WITHIN_S)
        assert len(cluster.of("nats")) == 3
        await cluster.scale(WORKERS, 2, WITHIN_S)
        for pod in cluster.pods.values():
            if not pod.ended.is_set():
                for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                    assert await pod.passes(kind), (pod.name, kind)
        async with cluster.service("slackline-gateway") as url:
            load = Load(url, key)
            async with load.running(6):
                await _kills(cluster, load)
                await _a_replica_comes_and_goes(cluster, load)
                await _keys_are_renewed(cluster, load)
            await _a_tier_comes_in(cluster, url, key)
        await cluster.uninstall()
        outlasted = [said for said in cluster.said if "is killed" in said]
        assert not outlasted, outlasted


async def _kills(cluster: Cluster, load: Load) -> None:
    """A server and a worker die in the middle of answers."""
    for victim in (
        cluster.of("nats")[0].children["nats"],
        cluster.of("worker")[1].children["worker"],
    ):
        await load.until_served(6)
        victim.kill()
        await load.until_served(12)
    await cluster.until_ready(WITHIN_S)


async def _a_replica_comes_and_goes(cluster: Cluster, load: Load) -> None:
    """Its key and its log are there from the start; it works, and drains when it leaves."""
    await cluster.scale(WORKERS, 3, WITHIN_S)
    served = re.compile(rf'"finish_reason":"length".*"replica":"{WORKERS}-2"')

    async def has_served() -> bool:
        logs = cluster.folder.glob("*.admission.log")
        return any(served.search(log.read_text()) for log in logs)

    await _until(has_served, True)
    await cluster.scale(WORKERS, 2, WITHIN_S)
    assert '"service.stopped"' in (cluster.folder / f"{WORKERS}-2.worker.log").read_text()
    await load.until_served(12)


async def _keys_are_renewed(cluster: Cluster, load: Load) -> None:
    """All services have new keys and a new tenant comes in, all is replaced, and the keys from
    before are let in no more.
    """
    services = ("worker", "gateway", "admission", "planner", "relegation")
    rotate = dict.fromkeys((*services, "tenant"), "2")
    before = cluster.secrets.data["slackline-keys-worker-sim"]
    default = cluster.secrets.data["slackline-keys-tenant-default"]["user.nk"]
    await _upgraded(cluster, {"tenants": ["default", "acme"], "rotate": rotate})
    after = cluster.secrets.data["slackline-keys-worker-sim"]
    assert {name for name in after if after[name] != before[name]} == before.keys() - {"ca.pem"}
    acme = cluster.secrets.data["slackline-keys-tenant-acme"]["user.nk"]
    await _until(lambda: _is_let_in(cluster, "acme", acme), True)
    assert await _is_let_in(cluster, "default", default)
    await load.until_served(12)
    await _all_is_replaced(cluster, load)
    await _upgraded(cluster, {"rotate": rotate, "earlier": "drop"})
    await _until(lambda: _is_let_in(cluster, "acme", acme), False)
    await _until(lambda: _is_let_in(cluster, "default", default), False)
    default = cluster.secrets.data["slackline-keys-tenant-default"]["user.nk"]
    assert await _is_let_in(cluster, "default", default)
    assert cluster.secrets.data["slackline-keys-worker-sim"] == after
    await load.until_served(12)


async def _upgraded(cluster: Cluster, keys: dict[str, Any]) -> None:
    cluster.apply(render({**VALUES, "keys": keys}))
    await cluster.until_ready(WITHIN_S)
    cluster.refresh()


async def _all_is_replaced(cluster: Cluster, load: Load) -> None:
    """Every pod of every kind, as by `kubectl rollout restart` of all at once."""
    components = ("nats", "worker", "planner", "admission", "relegation", "gateway")
    before = set(cluster.pods.values())
    served = load.served
    async with asyncio.TaskGroup() as tasks:
        for component in components:
            tasks.create_task(cluster.roll_out(component, WITHIN_S), name=component)
    left = before & set(cluster.pods.values())
    assert {pod.kind for pod in left} == {"Job"}
    assert load.served > served
    await load.until_served(12)


async def _a_tier_comes_in(cluster: Cluster, url: str, key: str) -> None:
    """A change of the ConfigMap counts while the services run."""

    async def status() -> int:
        headers = {"Authorization": f"Bearer {key}", "x-slackline-tier": "night"}
        body = {"model": MODELS[-1], "prompt": "What is a river?", "max_tokens": 4}
        async with httpx.AsyncClient(trust_env=False, timeout=WITHIN_S, headers=headers) as http:
            return (await http.post(f"{url}/v1/completions", json=body)).status_code

    assert await status() == httpx.codes.BAD_REQUEST
    config = CONFIG.read_text() + "\n[tiers.night]\nslo = { ttlt_s = 3600 }\n"
    cluster.apply(render({**VALUES, "config": config}))
    await _until(status, httpx.codes.OK)


async def _is_let_in(cluster: Cluster, tenant: str, seed: bytes) -> bool:
    """Tell whether each server lets this key of a tenant in."""
    user, creds, trusted = User(Role.TENANT, tenant), cluster.folder / "seed", cluster.folder / "ca"
    creds.write_bytes(seed)
    trusted.write_bytes(cluster.secrets.data["slackline-keys-authority"]["ca.pem"])
    for pod in cluster.of("nats"):
        client = OrderedClient()
        try:
            await client.connect(
                f"nats://{pod.address}:4222",
                inbox_prefix=user.inboxes[-1],
                allow_reconnect=False,
                tls=trusting(str(trusted)),
                **client.log_in(str(creds)),
            )
            await client.close()
        except (nats.errors.Error, OSError):
            return False
    return True


async def _until(asked: Callable[[], Awaitable[Any]], wanted: Any) -> None:
    async with asyncio.timeout(WITHIN_S):
        while await asked() != wanted:
            await asyncio.sleep(0.5)
