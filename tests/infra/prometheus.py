"""Runs a real Prometheus with the alert rules that are shipped, for tests of boards and alerts."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from loadgen.fleet.ports import free_port

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "infra" / "prometheus"
UNPACKED = ROOT / "var" / "prometheus" / "usr" / "bin"  # infra/prometheus/get.sh
MISSING = "there is no {} here: infra/prometheus/get.sh has it where apt works"
WITHIN_S = 60.0


def find(program: str) -> str:
    """The path of prometheus or promtool; skips the test where there is none."""
    found = shutil.which(program) or shutil.which(program, path=str(UNPACKED))
    if found is None:
        pytest.skip(MISSING.format(program))
    return found


class Prometheus:
    """The HTTP API of a running server."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self.url, self._http = url, http

    async def get(self, path: str, **params: str) -> Any:
        """The data of an answer. Raises AssertionError with Prometheus' words if it refuses."""
        answer = await self._http.get(f"{self.url}/api/v1/{path}", params=params)
        body = answer.json()
        assert body["status"] == "success", body
        return body["data"]

    async def query(self, expr: str) -> list[dict[str, Any]]:
        """The samples that are numbers, of an instant query."""
        found = (await self.get("query", query=expr))["result"]
        return [one for one in found if one["value"][1] != "NaN"]

    async def alerts(self) -> set[str]:
        """The names of the alerts that fire."""
        found = (await self.get("alerts"))["alerts"]
        return {one["labels"]["alertname"] for one in found if one["state"] == "firing"}


def write_config(folder: Path, targets: Mapping[str, list[str]]) -> Path:
    """The shipped configuration with these addresses (host:port) for its jobs."""
    config = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(SHIPPED / name) for name in config["rule_files"]]
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    assert targets.keys() <= jobs.keys()
    config["scrape_configs"] = []
    for name, addresses in targets.items():
        job = {k: v for k, v in jobs[name].items() if not k.endswith("_sd_configs")}
        job["static_configs"] = [{"targets": addresses}]
        config["scrape_configs"].append(job)
    folder.mkdir()
    written = folder / "prometheus.yml"
    written.write_text(yaml.safe_dump(config))
    return written


@asynccontextmanager
async def prometheus(folder: Path, targets: Mapping[str, list[str]]) -> AsyncIterator[Prometheus]:
    """Scrape these addresses."""
    url = f"http://127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        find("prometheus"),
        f"--config.file={write_config(folder, targets)}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={url.removeprefix('http://')}",
        "--enable-feature=exemplar-storage",
        "--log.level=error",
    )
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=WITHIN_S) as http:
            async with asyncio.timeout(WITHIN_S):
                while not await _is_ready(process, url, http):
                    await asyncio.sleep(0.1)
            yield Prometheus(url, http)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _is_ready(process: asyncio.subprocess.Process, url: str, http: httpx.AsyncClient) -> bool:
    assert process.returncode is None, "prometheus ended: its words are above"
    try:
        return (await http.get(f"{url}/-/ready")).status_code == 200
    except httpx.TransportError:
        return False
