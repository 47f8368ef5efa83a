"""The gateway as a service: a connection to the bus, a listener, and an orderly stop."""

import asyncio
import contextlib
import math
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from msgspec.structs import replace

from services.gateway.api.alive import Fleet, follow
from services.gateway.app import Gateway, Stored
from services.gateway.clocks import Clocks
from services.gateway.config import GatewayConfig
from services.gateway.console import Console
from services.gateway.http.certificate import certificate_of
from services.gateway.http.connection import Connections, connection_class
from services.gateway.telemetry.gen_ai import GenAi
from shared import subjects
from shared.bus.api import Call
from shared.bus.nats import NatsBus, connect
from shared.bus.users import GATEWAY
from shared.client.client import Client, Patience
from shared.clock import Clock
from shared.errors import ConfigError
from shared.process import logs
from shared.process.chores import before
from shared.process.configuration import authority, without_secrets
from shared.process.fleet_time import FleetTime
from shared.process.reload import follow_files, rules_of
from shared.process.stopping import ended_in_time
from shared.process.upkeep import Upkeep
from shared.rules import http_keys
from shared.schemas import TimeTold
from shared.telemetry.instruments import Registry
from shared.telemetry.telemetry import Tracing

FILES_KEPT = 64  # open files for the bus, the logs and the configuration
# connections beyond those of unfinished requests: for /health and /metrics
SPARE_CONNECTIONS = 32
log = logs.logger()


class Server(uvicorn.Server):
    """uvicorn's server. It stops when `should_exit` is set; main handles the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(cfg: GatewayConfig) -> socket.socket:
    """A bound socket; connections queue. `::` takes IPv4 too, if possible. Raises ConfigError."""
    try:
        if ":" not in cfg.host:
            return socket.create_server((cfg.host, cfg.port), backlog=1024)
        both = cfg.host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(
            (cfg.host, cfg.port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=both
        )
    except OSError as error:
        address = authority(cfg.host, cfg.port)
        raise ConfigError(f"gateway: cannot listen on {address}: {error}") from error


def within_open_files(cfg: GatewayConfig) -> GatewayConfig:
    """The configuration with no more connections than open files, and fewer requests than these."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    connections = cfg.connections_limit
    if files != resource.RLIM_INFINITY:
        connections = min(connections, max(2 * SPARE_CONNECTIONS, files - FILES_KEPT))
    requests = min(cfg.requests_limit, max(1, connections - SPARE_CONNECTIONS))
    if (connections, requests) == (cfg.connections_limit, cfg.requests_limit):
        return cfg
    log.warning(
        "connections.limited",
        open_files=files,
        connections_limit=connections,
        requests_limit=requests,
    )
    return replace(cfg, connections_limit=connections, requests_limit=requests)


async def serve(
    cfg: GatewayConfig,
    listener: socket.socket,
    stop: asyncio.Event,
    tracing: Tracing,
    gen_ai: GenAi | None = None,
) -> None:
    """Serves until `stop`; then running streams have drain_s to finish, and may be attached to
    again. Raises ConfigError at the start, and the bus's failure.
    """
    clock, registry = Clock(), Registry()
    written, cfg = cfg, within_open_files(cfg)
    rules = rules_of(cfg)
    console_keys = http_keys.read(Path(cfg.console_keys)) if cfg.console_keys else None
    certificate = certificate_of(cfg)
    fleet, clocks = Fleet(clock, cfg.fresh_s, rules), Clocks(clock)

    def on_time(told: TimeTold, _: Call) -> None:
        clocks.hear(told)

    async def serve_on(bus: NatsBus) -> None:
        async with (
            Client(bus, clock, patience=Patience(submit_s=cfg.submit_s)) as client,
            asyncio.TaskGroup() as tasks,
        ):
            instance = f"gateway-{socket.gethostname()}-{os.getpid()}"
            time = FleetTime(bus, clock, "gateway", instance, registry)
            await time.begin()
            digests = tasks.create_task(follow(fleet, bus), name="gateway.fleet")
            times = await bus.subscribe(subjects.TIMES, TimeTold, on_time)
            timing = tasks.create_task(time.keep(), name="gateway.time")
            console = Console(rules, bus, clock, tasks, console_keys)
            meter = gen_ai or GenAi()
            stored = Stored(bus.batches, bus.files)
            gateway = Gateway(
                cfg,
                rules,
                client,
                fleet,
                clocks,
                clock,
                registry,
                tracing,
                meter,
                tasks,
                console,
                stored,
            )
            http = uvicorn.Config(
                gateway.app(),
                log_config=None,
                access_log=False,
                lifespan="off",
                # first the answer is given up, so that a client that still comes reads its end
                http=connection_class(
                    Connections(cfg.connections_limit, registry, clock),
                    cfg.head_within_s,
                    2 * cfg.stall_s,
                ),
                ws="none",
                timeout_keep_alive=cfg.idle_s,  # type: ignore[arg-type]  # a call_later takes it
                timeout_graceful_shutdown=math.ceil(cfg.drain_s),
                ssl_certfile=cfg.tls_cert or None,
                ssl_keyfile=cfg.tls_key or None,
            )
            server = Server(http)
            serving = tasks.create_task(server.serve(sockets=[listener]), name="gateway.http")
            batches = tasks.create_task(gateway.runner.run(), name="gateway.batches")
            stopping = tasks.create_task(stop.wait(), name="gateway.stop")
            revoking = tasks.create_task(gateway.follow_keys(), name="gateway.keys")
            following = tasks.create_task(
                follow_files("gateway", written, rules), name="gateway.rules"
            )
            upkeep = Upkeep(
                bus,
                clock,
                registry,
                cfg.tls_ca,
                (lambda: certificate.end_unix_s) if certificate else None,
            )
            watching = [tasks.create_task(upkeep.run(), name="gateway.upkeep")]
            if certificate is not None:
                http.load()
                assert http.ssl is not None
                watching.append(
                    tasks.create_task(certificate.follow(http.ssl), name="gateway.certificate")
                )
            scheme = "https" if cfg.tls_cert else "http"
            host, port = listener.getsockname()[:2]
            log.info(
                "service.ready",
                address=f"{scheme}://{authority(host, port)}",
                config=without_secrets(cfg),
            )
            ends: list[asyncio.Future[Any]] = [serving, stopping, bus.failed]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            gateway.http_requests.draining = True
            server.should_exit = True
            stopping.cancel()
            following.cancel()
            revoking.cancel()
            batches.cancel()
            timing.cancel()
            for task in watching:
                task.cancel()
            await serving
            await console.stop()
            digests.cancel()
            await times.stop()

    connection = connect(cfg.url, "gateway", GATEWAY, creds=cfg.creds, tls_ca=cfg.tls_ca)
    async with contextlib.AsyncExitStack() as stack:
        bus = await before(stop, stack.enter_async_context(connection))
        if bus is not None:
            await ended_in_time(serve_on(bus), bus, stop, cfg.drain_s)
    log.info("service.stopped")
