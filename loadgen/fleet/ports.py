"""Ports of this machine that nobody takes before they are used."""

import secrets
import socket

from shared.errors import ConfigError

HOST = "127.0.0.1"
# Systems give ports above these to outgoing connections, and to who asks for any: one of those may
# be gone before a process has started, or while it is started again.
PORTS = range(20_000, 32_768)
TRIES = 1000


def free_port() -> int:
    """A port that is free, drawn at random: two fleets that start at once take others. Raises
    ConfigError if none is found.
    """
    for _ in range(TRIES):
        port = PORTS[secrets.randbelow(len(PORTS))]
        if is_free(port):
            return port
    raise ConfigError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free on {HOST}")


def is_free(port: int) -> bool:
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return False
    return True
