"""Container health check: asks a service over NATS, or a URL over HTTP, whether it answers.

The exit status is 0 if it does, 1 if not.

    python infra/health.py planner                     any instance of the service
    python infra/health.py requests                    any admission that can write to the store
    python infra/health.py worker replica=r1           the instance with this metadata
    python infra/health.py http://127.0.0.1:8080/ready

It asks `$SRV.PING.<service>` of the NATS services API, on the server of SLACKLINE_URL, over a plain
socket. So it starts in 50 ms and needs no package. No certificate is checked.
"""

import json
import os
import socket
import ssl
import sys
import time
import urllib.request
from urllib.parse import urlsplit

LIMIT_S = 3.0


def answers_http(url: str) -> bool:
    # a service asks itself on loopback, and its certificate names another address
    trusting = ssl._create_unverified_context() if url.startswith("https:") else None
    with urllib.request.urlopen(url, timeout=LIMIT_S, context=trusting) as response:
        return bool(response.status == 200)


def answers_nats(url: str, service: str, metadata: dict[str, str]) -> bool:
    """True if the service answers. Raises OSError if the server does not answer in time."""
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    options: dict[str, object] = {
        "verbose": False,
        "pedantic": False,
        "name": "health",
        "lang": "python",
        "version": "1",
    }
    options |= {"protocol": 1, "headers": True, "no_responders": True}
    if parts.username:
        options |= (
            {"user": parts.username, "pass": parts.password}
            if parts.password
            else {"auth_token": parts.username}
        )
    inbox = f"_INBOX.health{os.getpid()}"
    give_up_s = time.monotonic() + LIMIT_S
    with socket.create_connection(
        (parts.hostname or "127.0.0.1", parts.port or 4222), timeout=LIMIT_S
    ) as connection:
        lines = connection.makefile("rb")
        connection.sendall(
            (
                f"CONNECT {json.dumps(options)}\r\nSUB {inbox} 1\r\n"
                f"PUB $SRV.PING.{service} {inbox} 0\r\n\r\n"
            ).encode()
        )
        while (left_s := give_up_s - time.monotonic()) > 0:
            connection.settimeout(left_s)
            words = lines.readline().split()
            if not words or words[0] == b"-ERR":
                return False
            if words[0] == b"PING":
                connection.sendall(b"PONG\r\n")
            if words[0] in (b"MSG", b"HMSG"):
                headers = int(words[-2]) if words[0] == b"HMSG" else 0
                body = lines.read(int(words[-1]) + 2)[headers:-2]
                if not body:  # no responders
                    return False
                if metadata.items() <= (json.loads(body).get("metadata") or {}).items():
                    return True
    return False


def main(target: str, *metadata: str) -> int:
    try:
        if target.startswith("http"):
            return int(not answers_http(target))
        url = os.environ.get("SLACKLINE_URL", "nats://127.0.0.1:4222")
        return int(not answers_nats(url, target, dict(pair.split("=", 1) for pair in metadata)))
    except OSError as error:
        print(f"{target}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
