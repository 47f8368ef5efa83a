"""Runs `slackline keys` in a pod: reads the fleet's keys from Secrets, makes what is missing, takes
away what is not wanted any more, and writes a Secret for each user.

The Secrets are there already, empty at first: this pod may read and change them and no other. The
Secret of the server is written last. If the pod dies before, the next one makes the keys anew that
this Secret does not know. A pod that runs at the same time makes it fail, and try again.
"""

import base64
import json
import os
import ssl
import sys
import urllib.request
from pathlib import Path
from typing import Any

from loadgen.cli.main import main as slackline
from loadgen.fleet.key_folder import SERVICES, Keys
from shared.bus.users import Role, User

FOLDER = Path("/keys")
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
SHARED = {
    "authority": ("ca.pem", "ca.key"),
    "server": ("users.json", "earlier.json", "server.pem", "server.key"),
}


class Secrets:
    """The Secrets of this namespace whose names begin with a prefix."""

    def __init__(self, prefix: str) -> None:
        host, port = (os.environ[f"KUBERNETES_SERVICE_{n}"] for n in ("HOST", "PORT"))
        host = f"[{host}]" if ":" in host else host
        namespace = (ACCOUNT / "namespace").read_text()
        self._url = f"https://{host}:{port}/api/v1/namespaces/{namespace}/secrets/{prefix}"
        self._token = (ACCOUNT / "token").read_text()
        self._trust = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
        self._versions = dict[str, str]()

    def read(self, name: str) -> dict[str, bytes]:
        found = self._ask("GET", name)
        self._versions[name] = found["metadata"]["resourceVersion"]
        return {key: base64.b64decode(value) for key, value in found.get("data", {}).items()}

    def write(self, name: str, files: dict[str, bytes], before: dict[str, bytes]) -> None:
        """Replace the files of a Secret that was read. Fails if another pod wrote it meanwhile."""
        data = dict[str, str | None](dict.fromkeys(before))
        data |= {key: base64.b64encode(value).decode() for key, value in files.items()}
        version = {"resourceVersion": self._versions[name]}
        self._ask("PATCH", name, {"metadata": version, "data": data})

    def _ask(self, method: str, name: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            self._url + name,
            None if body is None else json.dumps(body).encode(),
            {
                "Authorization": f"Bearer {self._token}",
                "Content-Type": "application/merge-patch+json",
            },
            method=method,
        )
        with urllib.request.urlopen(request, timeout=30, context=self._trust) as response:
            return json.load(response)


def secret_of(user: User, sets: dict[str, list[str]]) -> tuple[str, str]:
    """The Secret of a user, and its file there. The workers of a model share one."""
    if user.role is Role.WORKER:
        model = next(model for model, replicas in sets.items() if user.name in replicas)
        return f"worker-{model}", f"{user.name}.nk"
    return f"{user.role}-{user.name}" if user.name else str(user.role), "user.nk"


def main() -> None:
    # {"prefix", "sets": {model: [replica]}, "tenants", "hosts", "rotate": {user or role: text},
    #  "earlier": keep or drop}
    wanted = json.loads(sys.argv[1])
    sets, rotate = wanted["sets"], wanted["rotate"]
    secrets, keys = Secrets(wanted["prefix"]), Keys(FOLDER)
    replicas = [replica for found in sets.values() for replica in found]
    users = [*SERVICES, *(User(Role.WORKER, name) for name in replicas)]
    users += [User(Role.TENANT, name) for name in wanted["tenants"]]
    places = {user: secret_of(user, sets) for user in users}
    before = {
        name: secrets.read(name) for name in {*SHARED, *(name for name, _ in places.values())}
    }

    for name, files in SHARED.items():
        (FOLDER / name).mkdir(parents=True, exist_ok=True)
        for file in files:
            if file in before[name]:
                (FOLDER / name / file).write_bytes(before[name][file])
    rotated = json.loads(before["server"].get("rotated.json", b"{}"))
    turned = {name for name, text in rotate.items() if rotated.get(name) != text}
    known = list(keys.users())
    lost = [u for u in known if u not in places or places[u][1] not in before[places[u][0]]]
    renewed = [u for u in known if u not in lost and {str(u), str(u.role)} & turned]
    for done, users_done, words in (
        (keys.revoke, lost, "let in no more"),
        (keys.renew, renewed, "to have a new key"),
    ):
        if users_done:
            done(users_done)
            print(f"{words}: {', '.join(map(str, users_done))}")
    if wanted["earlier"] == "drop" and known:
        keys.forget()
    joined = [",".join(names) for names in (replicas, wanted["tenants"], wanted["hosts"])]
    options = zip(("--workers", "--tenants", "--hosts"), joined, strict=True)
    if code := slackline(["keys", str(FOLDER), *(word for pair in options for word in pair)]):
        sys.exit(code)

    after: dict[str, dict[str, bytes]] = {name: {} for name in before}
    authority = (FOLDER / "authority" / "ca.pem").read_bytes()
    for user, (name, file) in places.items():
        creds = keys.creds(user)
        seed = creds.read_bytes() if creds.exists() else before[name][file]
        after[name] |= {file: seed, "ca.pem": authority}
    for name, files in SHARED.items():
        after[name] = {file: (FOLDER / name / file).read_bytes() for file in files}
    after["server"] |= {
        "nats.conf": keys.server_conf.read_bytes(),
        "ca.pem": authority,  # by which the servers know each other
        "rotated.json": json.dumps(rotate).encode(),
    }
    for name in sorted(after, key=lambda name: name == "server"):
        if after[name] != before[name]:
            secrets.write(name, after[name], before[name])
            print(f"written: {wanted['prefix']}{name}")


if __name__ == "__main__":
    main()
