"""The folder of keys of one fleet: who may connect to its NATS server, and how they know it.

    <user>/user.nk, ca.pem     for the process or client that is this user, and for no other; a user
                               is `admission`, ..., `worker/r1`, `tenant/acme`
    server/nats.conf           users, permissions and TLS, for `include` in nats-server.conf
    server/users.json          the public key of each user
    server/earlier.json        the public keys of users before these, as long as they are let in
    server/server.pem, .key    the certificate of the server, and ca.pem, by which the servers of a
                               cluster know each other
    authority/ca.pem, ca.key   signs that certificate; no process needs the key

A seed is written once, and only its user reads it: it may be taken away from here. All files are
0600, all folders 0700.
"""

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from loadgen.fleet import certificates
from loadgen.fleet.certificates import Pair
from shared import subjects
from shared.bus.nkey import login_of, new_seed
from shared.bus.permissions import publishes, subscribes
from shared.bus.users import OPERATOR, Role, User, user_named
from shared.errors import ConfigError, PeerError
from shared.vocabulary import ReplicaId

T = TypeVar("T")
SERVICES = tuple(User(role) for role in Role if role not in (Role.WORKER, Role.TENANT))
# JetStream has an account of its own, which answers these. It answers at whatever subject its asker
# names: within the account of the users it could be made to write its own streams.
STORED = ("$JS.API.>", "$KV.>", "$O.>", subjects.ack_log(ReplicaId(subjects.EVERY)))
HOSTS = ("localhost", "127.0.0.1", "::1")


class Keys:
    """The keys in a folder, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    @property
    def server_conf(self) -> Path:
        return self.folder / "server" / "nats.conf"

    @property
    def server_certificate(self) -> Path:
        return self.folder / "server" / "server.pem"

    def creds(self, user: User) -> Path:
        return self._folder(user) / "user.nk"

    def tls_ca(self, user: User) -> Path:
        return self._folder(user) / "ca.pem"

    def users(self) -> dict[User, str]:
        """The public key of each user. Raises ConfigError."""
        return self._read("users.json", dict[str, str])

    def _earlier(self) -> dict[User, list[str]]:
        return self._read("earlier.json", dict[str, list[str]])

    def _read(self, name: str, kind: type[dict[str, T]]) -> dict[User, T]:
        """A file of the server's folder by user; empty if there is none. Raises ConfigError."""
        file = self.folder / "server" / name
        try:
            found = msgspec.json.decode(file.read_bytes(), type=kind)
            return {user_named(name): value for name, value in found.items()}
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError, PeerError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from error

    def add(self, users: Iterable[User], hosts: Sequence[str] = HOSTS) -> list[User]:
        """Make keys for the users and the services that have none. Returns the users with new keys.
        Keys that are there stay. Raises ConfigError.
        """
        try:
            return self._add([*SERVICES, *users], hosts)
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be written: {error}") from error

    def revoke(self, users: Iterable[User]) -> None:
        """Let these users in no more, once the server reads it. ConfigError: one has no key."""
        known, earlier = self.users(), self._earlier()
        for user in users:
            self._take(known, user)
            earlier.pop(user, None)
        self._write_server(known, earlier)

    def renew(self, users: Iterable[User]) -> None:
        """Let `add` make new keys for these users. They are let in with the keys that they have
        until `forget`, so that processes may change one after another. ConfigError: one has none.
        """
        known, earlier = self.users(), self._earlier()
        for user in users:
            earlier.setdefault(user, []).append(self._take(known, user))
        self._write_server(known, earlier)

    def forget(self) -> None:
        """Let nobody in with a key from before a `renew`."""
        self._write_server(self.users(), {})

    def _take(self, known: dict[User, str], user: User) -> str:
        """Take a user's key away, and return the public one. Raises ConfigError."""
        if user not in known:
            raise ConfigError(f"{user} has no key in {self.folder}")
        shutil.rmtree(self._folder(user), ignore_errors=True)
        return known.pop(user)

    def _write(self, file: Path, content: bytes, *, new: bool = False) -> None:
        """Write a file for its owner only, at once. `new`: it must not exist. Raises OSError."""
        _private(file.parent, self.folder)
        if new and file.exists():
            raise FileExistsError(f"{file} is there already, and is not overwritten")
        beside = file.with_name(f".{file.name}.new")
        beside.unlink(missing_ok=True)
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(content)
        beside.replace(file)

    def _folder(self, user: User) -> Path:
        return self.folder / user.role / user.name

    def _add(self, users: Sequence[User], hosts: Sequence[str]) -> list[User]:
        known, made = self.users(), list[User]()
        authority = self._authority()
        for user in users:
            if user not in known:
                seed = new_seed()
                self._write(self.creds(user), f"{seed}\n".encode(), new=True)
                self._write(self.tls_ca(user), authority.certificate, new=True)
                known[user] = login_of(seed.encode()).public
                made.append(user)
        self._certify(authority, hosts)
        self._write_server(known, self._earlier())
        return made

    def _authority(self) -> Pair:
        certificate, key = (self.folder / "authority" / name for name in ("ca.pem", "ca.key"))
        if not key.exists():
            pair = certificates.new_authority()
            self._write(key, pair.key, new=True)
            self._write(certificate, pair.certificate, new=True)
        return Pair(certificate.read_bytes(), key.read_bytes())

    def _certify(self, authority: Pair, hosts: Sequence[str]) -> None:
        """Make the server's certificate, unless there is one for these hosts that stays valid. A
        new one has the hosts of the one before, too.
        """
        certificate, key = self.server_certificate, self.folder / "server" / "server.key"
        self._write(self.folder / "server" / "ca.pem", authority.certificate)
        if certificate.exists():
            present = certificate.read_bytes()
            if certificates.is_current(present, hosts):
                return
            hosts = list(dict.fromkeys((*hosts, *certificates.hosts_of(present))))
        pair = certificates.new_server(authority, hosts)
        self._write(key, pair.key)
        self._write(certificate, pair.certificate)

    def _write_server(self, users: dict[User, str], earlier: dict[User, list[str]]) -> None:
        folder = self.folder / "server"
        keys = [*users.items(), *((user, key) for user, old in earlier.items() for key in old)]
        conf: dict[str, Any] = {
            "accounts": {
                "STORE": {
                    "jetstream": "enabled",
                    "exports": [{"service": s, "response": "stream"} for s in STORED],
                },
                "FLEET": {
                    "users": [_entry(user, public) for user, public in keys],
                    "imports": [{"service": {"account": "STORE", "subject": s}} for s in STORED],
                },
            },
            "tls": {
                "cert_file": str(folder / "server.pem"),
                "key_file": str(folder / "server.key"),
            },
        }
        for file, found in (("users.json", users), ("earlier.json", earlier)):
            names = {str(user): value for user, value in found.items()}
            self._write(folder / file, json.dumps(names, indent=2).encode())
        lines = [f"{name}: {json.dumps(value, indent=2)}" for name, value in conf.items()]
        self._write(folder / "nats.conf", "\n".join([*lines, ""]).encode())


def _entry(user: User, public: str) -> dict[str, Any]:
    """The user in the server's configuration; without permissions it may do everything."""
    permissions = {
        "publish": {"allow": list(publishes(user))},
        "subscribe": {"allow": list(subscribes(user))},
    }
    return {"nkey": public} | ({} if user == OPERATOR else {"permissions": permissions})


def _private(folder: Path, root: Path) -> None:
    """Make the folder, and those between it and `root`, for its owner only."""
    if folder != root:
        _private(folder.parent, root)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
