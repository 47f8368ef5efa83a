"""Finds free ports of this machine that no other process is likely to take before their use."""

import secrets
import socket

from shared.errors import ConfigError

HOST = "127.0.0.1"
# Systems give ports above these to outgoing connections, and to who asks for any: one of those may
# be gone before a process has started, or while it is started again.
PORTS = range(20_000, 32_768)
TRIES = 1000

_given = set[int]()  # by this process


def free_port() -> int:
    """A port that is free, drawn at random: two fleets that start at once take others. A process
    gets none twice before it has had half of them. Raises ConfigError if none is found.
    """
    if 2 * len(_given) >= len(PORTS):
        _given.clear()
    for _ in range(TRIES):
        port = PORTS[secrets.randbelow(len(PORTS))]
        if port not in _given and is_free(port):
            _given.add(port)
            return port
    raise ConfigError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free on {HOST}")


def is_free(port: int) -> bool:
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return False
    return True
