"""Answers as the API server of a cluster would, for Secrets alone: over TLS, to the accounts that
the rendered roles name, with merge patches and versions.
"""

import base64
import contextlib
import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from loadgen.fleet.certificates import new_authority, new_server
from tests.infra.helm.chart import Object

TOKENS = "token-of-"  # and the service account


class Secrets:
    """The Secrets of the namespace, and who may do what with them."""

    def __init__(self, objects: list[Object]) -> None:
        self.data: dict[str, dict[str, bytes]] = {}
        self.versions: dict[str, int] = {}
        self._may: set[tuple[str, str, str]] = set()
        self.apply(objects)

    def apply(self, objects: list[Object]) -> None:
        """Take over the Secrets and roles of a release. A Secret that is there keeps its data."""
        roles = {one["metadata"]["name"]: one["rules"] for one in objects if one["kind"] == "Role"}
        for one in objects:
            if one["kind"] == "Secret":
                self.data.setdefault(one["metadata"]["name"], {})
                self.versions.setdefault(one["metadata"]["name"], 1)
            if one["kind"] == "RoleBinding":
                self._may |= {
                    (subject["name"], verb, name)
                    for subject in one["subjects"]
                    for rule in roles[one["roleRef"]["name"]]
                    if "secrets" in rule["resources"]
                    for verb in rule["verbs"]
                    for name in rule["resourceNames"]
                }

    def answer(self, account: str, verb: str, name: str, patch: Any) -> tuple[int, Any]:
        """The status and the body of the answer."""
        if (account, verb, name) not in self._may:
            return 403, {"message": f"{account} may not {verb} {name}"}
        if name not in self.data:
            return 404, {"message": f"there is no {name}"}
        if patch is not None:
            if patch["metadata"]["resourceVersion"] != str(self.versions[name]):
                return 409, {"message": f"{name} has been written meanwhile"}
            merged = {**self.data[name], **_decoded(patch["data"])}
            self.data[name] = {key: value for key, value in merged.items() if value is not None}
            self.versions[name] += 1
        encoded = {key: base64.b64encode(value).decode() for key, value in self.data[name].items()}
        version = str(self.versions[name])
        return 200, {"metadata": {"name": name, "resourceVersion": version}, "data": encoded}


def _decoded(data: dict[str, str | None]) -> dict[str, Any]:
    return {key: None if text is None else base64.b64decode(text) for key, text in data.items()}


@contextlib.contextmanager
def api_server(secrets: Secrets, namespace: str, host: str, folder: Path) -> Iterator[int]:
    """Serve at a free port of this address, with a certificate whose authority is in `folder`."""
    authority = new_authority()
    pair = new_server(authority, [host])
    (folder / "ca.crt").write_bytes(authority.certificate)
    (folder / "server.pem").write_bytes(pair.certificate)
    (folder / "server.key").write_bytes(pair.key)

    class Handler(BaseHTTPRequestHandler):
        def answer(self, verb: str) -> None:
            length = int(self.headers.get("Content-Length", "0"))
            body = json.loads(self.rfile.read(length)) if length else None
            account = self.headers["Authorization"].removeprefix(f"Bearer {TOKENS}")
            root, _, name = self.path.rpartition("/")
            status, told = 404, {}
            if root == f"/api/v1/namespaces/{namespace}/secrets":
                status, told = secrets.answer(account, verb, name, body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(told).encode())

        def do_GET(self) -> None:
            self.answer("get")

        def do_PATCH(self) -> None:
            assert self.headers["Content-Type"] == "application/merge-patch+json"
            self.answer("patch")

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer((host, 0), Handler)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
