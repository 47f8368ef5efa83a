"""The keys of HTTP clients, each of which belongs to a tenant. A file has one line for each key:
the tenant, and the key's SHA-256. The key itself is stored nowhere.

A key is 256 random bits, so no list of likely keys exists, and nobody finds one from its hash: a
slow hash, as passwords need, would add nothing but time to each request.
"""

import hmac
import re
import secrets
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from shared.errors import ConfigError, PeerError
from shared.subjects import check_id
from shared.written import reading, text_of

LINE = re.compile(r"(\S+)\s+([0-9a-f]{64})")
KEY_BYTES = 32
A_KEY_IS_ONES = "a key belongs to one tenant"


def new_key() -> str:
    """A new key, to be shown once."""
    return f"sk-{secrets.token_urlsafe(KEY_BYTES)}"


def line_of(tenant: str, key: str) -> str:
    """The line of a key file for this key. Raises PeerError for a tenant that is no id."""
    return f"{check_id(tenant, 'tenant')} {_hash(key)}\n"


def read(path: Path) -> "HttpKeys":
    """The keys of a file, without empty lines and comments. Raises ConfigError with the line."""
    with reading(f"the keys in {path} cannot be read"):
        lines = text_of(path).splitlines()
    tenants: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        found = LINE.fullmatch(line.strip())
        try:
            if found is None:
                raise PeerError("a line is a tenant and the SHA-256 of a key, in hexadecimal")
            tenant = check_id(found[1], "tenant")
            if tenants.setdefault(found[2], tenant) != tenant:
                raise PeerError(f"the key is also {tenants[found[2]]}'s: {A_KEY_IS_ONES}")
        except PeerError as error:
            raise ConfigError(f"{path}, line {number}: {error.message}") from error
    if not tenants:
        raise ConfigError(f"{path} has no key: slackline key TENANT {path} makes one")
    return HttpKeys(tenants)


class HttpKeys:
    """The hashes of keys, and the tenant of each."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        self._tenants = dict(tenants)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HttpKeys) and self._tenants == other._tenants

    @property
    def tenants(self) -> frozenset[str]:
        """The tenants that have a key."""
        return frozenset(self._tenants.values())

    def with_more(self, tenants: Mapping[str, str]) -> "HttpKeys":
        """These keys and others. Raises ConfigError where both have one, of different tenants."""
        for key, tenant in tenants.items():
            if self._tenants.get(key, tenant) != tenant:
                both = f"{tenant}'s and {self._tenants[key]}'s"
                raise ConfigError(f"the key {key[:8]}... is {both}: {A_KEY_IS_ONES}")
        return HttpKeys(self._tenants | dict(tenants))

    def tenant_of(self, key: str) -> str | None:
        """The tenant of this key. The time does not depend on the key: all hashes are compared."""
        given, found = _hash(key), None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(given, known):
                found = tenant
        return found


def _hash(key: str) -> str:
    return sha256(key.encode(errors="replace")).hexdigest()
