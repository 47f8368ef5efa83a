"""Container health check: asks a service over NATS, or a URL over HTTP, whether it answers.

The exit status is 0 if it does, 1 if not.

    python infra/health.py planner                     any instance of the service
    python infra/health.py requests                    any admission that can write to the store
    python infra/health.py worker r1                   the worker of this replica
    python infra/health.py http://127.0.0.1:8080/ready

It asks `$SRV.PING.<service>` of the NATS services API, or asks the worker for its attempts, on the
first server of SLACKLINE_URL that answers, as the user of SLACKLINE_CREDS, over a plain socket: so
it starts in 50 ms, 100 ms with a key. The certificate of the gateway is not checked.
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
JSON = b"NATS/1.0\r\nContent-Type: application/json\r\n\r\n"


def answers_http(url: str) -> bool:
    # a service asks itself on loopback, and its certificate names another address
    trusting = ssl._create_unverified_context() if url.startswith("https:") else None
    with urllib.request.urlopen(url, timeout=LIMIT_S, context=trusting) as response:
        return bool(response.status == 200)


def answers_nats(urls: str, service: str, replica: str) -> bool:
    """True if the service, or the worker of this replica, answers. Raises OSError if no server
    answers in time.
    """
    role = {"requests": "admission"}.get(service, service)
    inbox = f"_ROLE.{role}{replica and '.'}{replica}.health.{os.urandom(8).hex()}"
    if replica:
        subject, headers, body = f"slo.v1.replica.{replica}.holdings", JSON, b'{"asked": []}'
    else:
        subject, headers, body = f"$SRV.PING.{service}", b"NATS/1.0\r\n\r\n", b""
    ask = f"HPUB {subject} {inbox} {len(headers)} {len(headers) + len(body)}\r\n".encode()
    give_up_s = time.monotonic() + LIMIT_S
    with connected_to_one(urls.split(",")) as connection:
        lines = connection.makefile("rb")
        connection.sendall(f"SUB {inbox} 1\r\n".encode() + ask + headers + body + b"\r\n")
        while (left_s := give_up_s - time.monotonic()) > 0:
            connection.settimeout(left_s)
            words = lines.readline().split()
            if not words or words[0] == b"-ERR":
                return False
            if words[0] == b"PING":
                connection.sendall(b"PONG\r\n")
            if words[0] in (b"MSG", b"HMSG"):
                head = int(words[-2]) if words[0] == b"HMSG" else 0
                return int(words[-1]) > head  # without a body: no responders
    return False


def connected_to_one(urls: list[str]) -> socket.socket:
    """A socket at the first server that lets it in; the servers share the time. Raises OSError."""
    for url in urls[:-1]:
        try:
            return connected(url, LIMIT_S / len(urls))
        except OSError as error:
            print(f"{url.rpartition('@')[2]}: {error}", file=sys.stderr)
    return connected(urls[-1], LIMIT_S / len(urls))


def connected(url: str, within_s: float) -> socket.socket:
    """A socket at the server, logged in. Raises OSError."""
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    host = parts.hostname or "127.0.0.1"
    connection = socket.create_connection((host, parts.port or 4222), timeout=within_s)
    greeting = b""
    while not greeting.endswith(b"\n") and (byte := connection.recv(1)):
        greeting += byte
    info = json.loads(greeting.removeprefix(b"INFO ") or b"{}")
    if info.get("tls_required"):
        trusted = ssl.create_default_context(cafile=os.environ.get("SLACKLINE_TLS_CA") or None)
        connection = trusted.wrap_socket(connection, server_hostname=host)
    options = {
        "verbose": False,
        "pedantic": False,
        "name": "health",
        "lang": "python",
        "version": "1",
        "protocol": 1,
        "headers": True,
        "no_responders": True,
    }
    options |= login(parts.username, parts.password, info.get("nonce", ""))
    connection.sendall(f"CONNECT {json.dumps(options)}\r\n".encode())
    return connection


def login(user: str | None, password: str | None, nonce: str) -> dict[str, str]:
    """The proof of who it is: by the key of SLACKLINE_CREDS, or by what the URL has."""
    creds = os.environ.get("SLACKLINE_CREDS")
    if creds:
        from shared.bus.nkey import read_login  # 30 ms

        key = read_login(creds)
        who = {"jwt": key.jwt} if key.jwt else {"nkey": key.public}
        return who | {"sig": key.sign(nonce).decode()}
    if user is None:
        return {}
    return {"auth_token": user} if password is None else {"user": user, "pass": password}


def main(target: str, replica: str = "") -> int:
    try:
        if target.startswith("http"):
            return int(not answers_http(target))
        url = os.environ.get("SLACKLINE_URL") or "nats://127.0.0.1:4222"
        return int(not answers_nats(url, target, replica))
    except (OSError, ValueError) as error:
        print(f"{target}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
