"""Tests of the compose file, run by podman: up, healthy, a streamed answer, a service killed and
back, metrics and traces in Prometheus, down. Skipped where there is no podman.

It takes minutes, since it builds the image. Grafana and Jaeger are left out: no package has them.
"""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from loadgen.fleet.ports import free_port
from tests.infra.prometheus import ROOT
from tests.infra.stand_ins import CONTAINERS_CONF, make_images, need_podman, podman

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
LEFT_OUT = ("jaeger", "grafana")
PROJECT = f"slackline-test-{os.getpid()}"
WITHIN_S = 300.0  # the longest that a busy machine may take for anything
pytestmark = pytest.mark.timeout(3600)


class Compose:
    """The fleet of the compose file. Its published ports are free ones."""

    def __init__(self, file: Path, socket: Path, profile: str) -> None:
        self._command = ["docker-compose", "-p", PROJECT, "--project-directory", str(ROOT)]
        self._command += ["-f", str(file), "--profile", profile, "--profile", "observe"]
        self._environment = os.environ | {
            "DOCKER_HOST": f"unix://{socket}",
            "OTEL_TRACES_EXPORTER": "otlp",
            "COMPOSE_HTTP_TIMEOUT": "600",
        }
        services = yaml.safe_load(file.read_text())["services"]
        profiles = (None, [profile], ["observe"])
        self.names = [name for name, s in services.items() if s.get("profiles") in profiles]
        self.checked = [name for name in self.names if "healthcheck" in services[name]]
        self._ports = {
            name: int(s["ports"][0].split(":")[1]) for name, s in services.items() if s.get("ports")
        }

    def __call__(self, *arguments: str) -> None:
        done = subprocess.run(
            [*self._command, *arguments],
            check=False,
            capture_output=True,
            text=True,
            env=self._environment,
            timeout=WITHIN_S * 2,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def url(self, service: str) -> str:
        return f"http://127.0.0.1:{self._ports[service]}"

    def container(self, service: str) -> str:
        return f"{PROJECT}_{service}_1"

    def healthy(self, service: str) -> bool:
        check = ["podman", "healthcheck", "run", self.container(service)]
        return subprocess.run(check, check=False, capture_output=True).returncode == 0


def with_free_ports(folder: Path) -> Path:
    """The compose file, with other ports published, and without GPUs and what cannot be had."""
    file = {**COMPOSE, "services": {}}
    for name, service in COMPOSE["services"].items():
        if name in LEFT_OUT:
            continue
        service = {key: value for key, value in service.items() if key != "deploy"}  # GPUs
        ports = [f"127.0.0.1:{free_port()}:{p.split(':')[-1]}" for p in service.get("ports", [])]
        file["services"][name] = {**service, **({"ports": ports} if ports else {})}
    written = folder / "docker-compose.yml"
    written.write_text(yaml.safe_dump(file))
    return written


@contextlib.contextmanager
def podman_service(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Podman's Docker API."""
    conf = folder / "containers.conf"
    conf.write_text(CONTAINERS_CONF)
    monkeypatch.setenv("CONTAINERS_CONF", str(conf))
    socket = folder / "podman.sock"
    process = subprocess.Popen(["podman", "system", "service", "--time=0", f"unix://{socket}"])
    try:
        yield socket
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def health_checks(compose: Compose) -> Iterator[None]:
    """Run every health check over and over, as systemd's timers would."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(1.0):
            for name in compose.checked:
                compose.healthy(name)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def until(condition: Any, what: str) -> None:
    """Wait for a condition; an error of HTTP counts as not yet."""
    end = time.monotonic() + WITHIN_S
    while time.monotonic() < end:
        with contextlib.suppress(httpx.HTTPError):
            if condition():
                return
        time.sleep(0.5)
    raise AssertionError(f"after {WITHIN_S} s: {what}")


def streamed_tokens(compose: Compose) -> int:
    """The tokens of a streamed answer, by its usage."""
    body = {
        "prompt": "What is a river?",
        "max_tokens": 16,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with (
        httpx.Client(trust_env=False, timeout=WITHIN_S) as http,
        http.stream("POST", f"{compose.url('gateway')}/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    assert chunks[0]["choices"]
    tokens: int = chunks[-1]["usage"]["completion_tokens"]
    return tokens


def found(compose: Compose, expr: str) -> list[dict[str, Any]]:
    """The answer of Prometheus, by its published port."""
    answer = httpx.get(
        f"{compose.url('prometheus')}/api/v1/query", params={"query": expr}, trust_env=False
    )
    result: list[dict[str, Any]] = answer.json()["data"]["result"]
    return result


@pytest.mark.parametrize(
    ("profile", "model"),
    [("sim", "sim-Llama-3-8B"), ("torch", "slackline-5m"), ("vllm", "slackline-5m")],
)
def test_the_fleet_in_containers_serves_survives_a_kill_and_is_watched(
    profile: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_podman()
    with podman_service(tmp_path, monkeypatch) as socket:
        make_images({name: s["image"] for name, s in COMPOSE["services"].items()}, profile)
        compose = Compose(with_free_ports(tmp_path), socket, profile)
        try:
            with health_checks(compose):
                compose("up", "-d", *compose.names)
            for name in compose.checked:
                until(lambda name=name: compose.healthy(name), f"{name} is not healthy")
            ready = f"{compose.url('gateway')}/ready"
            until(lambda: httpx.get(ready, trust_env=False).is_success, "the gateway is not ready")
            models = httpx.get(f"{compose.url('gateway')}/v1/models", trust_env=False).json()
            assert [one["id"] for one in models["data"]] == [model]
            assert streamed_tokens(compose) == 16

            workers = [name for name in compose.names if name.startswith("worker-")]
            worker = workers[0]
            killed = compose.container(worker)
            first = podman("inspect", "--format", "{{.State.Pid}}", killed)
            os.kill(int(first), signal.SIGKILL)
            until(
                lambda: podman("inspect", "--format", "{{.State.Pid}}", killed) not in (first, "0"),
                "the worker was not started again",
            )
            until(lambda: compose.healthy(worker), "the worker is not healthy again")
            assert streamed_tokens(compose) == 16

            for expr, least in (
                # admission, planner and relegation, and the workers
                ('count(up{job="slackline"} == 1)', 3 + len(workers)),
                ('count(up{job="gateway"} == 1)', 1),
                ("sum(slackline_offered_total)", 2),
                ("sum(vllm:generation_tokens_total)", 16),
                ('sum(traces_span_metrics_calls_total{service_name="gateway"})', 2),
                ('sum(traces_span_metrics_calls_total{service_name="admission"})', 2),
            ):
                until(
                    lambda expr=expr, least=least: any(
                        float(one["value"][1]) >= least for one in found(compose, expr)
                    ),
                    f"{expr} is less than {least}",
                )
        finally:
            compose("down", "--volumes", "--timeout", "5")
        left = podman("ps", "--all", "--filter", f"name={PROJECT}", "--format", "{{.Names}}")
        assert left == ""
