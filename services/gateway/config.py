"""The gateway's settings: section `gateway` of the file, or SLACKLINE_GATEWAY_<FIELD>."""

import re
from ipaddress import ip_address
from typing import Annotated

from msgspec import Meta

from shared.process.configuration import Connected, Constant
from shared.rules.model_names import Aliases
from shared.rules.rules import TenantSource, TierSource, read_tenants

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")


class GatewayConfig(Connected, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    """The address to serve."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8080
    """0: any free port; the log states it."""
    keys: str = ""
    """A file of keys, which `slackline key` makes. With it every request needs one."""
    without_keys: bool = False
    """Serves another address than loopback without keys: for a port published on loopback. The
    console is open to a browser that names a loopback address.
    """
    lenient: bool = True
    """Leaves out fields of a body that it does not serve, and names them in `x-slackline-ignored`;
    not those without which an answer would be to another question.
    """
    cors_origins: list[str] = []
    """Origins of web pages whose scripts may use the API, such as `https://chat.example.com`; `*`:
    all of them.
    """
    console_keys: str = ""
    """A file of keys, likewise, of those who may see the console. Without it the console is open
    on loopback where HTTP has no keys, and off elsewhere.
    """
    tls_cert: str = ""
    """A file with the certificate and those that sign it, in PEM; empty: no TLS."""
    tls_key: str = ""
    """The file of the certificate's key, in PEM."""
    connections_limit: Annotated[int, Meta(ge=1)] = 8192
    """Open connections; fewer where the system lets the process open fewer files. A new one takes
    the place of an idle one of the address that has the most of these.
    """
    idle_s: Annotated[float, Meta(gt=0)] = 75.0
    """An idle connection is closed after this long: later than a proxy in front gives it up, which
    is 60 s at nginx and at AWS's load balancers, and 600 s at Google's.
    """
    requests_limit: int = 4096
    """Unfinished requests at once, shared by the tenants that have any; about 50 KiB each with its
    socket.
    """
    tenant_files_bytes: int = 512 * 1024 * 1024
    """All files of one tenant, uploads under way at this gateway among them, so that no tenant
    fills the bucket of 2 GiB.
    """
    tiers: TierSource = "default"
    """The tiers, written here as `[tiers.NAME]`; or a built-in set, or a .toml or .json file."""
    default_tier: str = ""
    """The tier of a request that names none. Empty: that of the set, or the first one written."""
    tenants: TenantSource = ""
    """Tenants, written here as `[tenants.NAME]`, or a .toml file. The gateway reads their keys."""
    default_model: str = ""
    """The model of a request that names none, as admission has it."""
    aliases: Aliases = {}
    """Further names of models and LoRA adapters, written here as `[aliases]`: name = model."""
    drain_s: float = 30.0
    """The longest drain. Streams that still run are cut then, and it ends within 5 s."""

    # ------------------------------------------------------------ constants

    # The longest body, counted once for each of its choices. NATS carries 8 MiB in one
    # message; 64 KiB are for the other fields. The same prompt is never longer in msgpack than
    # in JSON.
    body_limit_bytes: Constant[int] = 8 * 1024 * 1024 - 64 * 1024
    # A connection whose head takes longer is closed.
    head_within_s: Constant[float] = 15.0
    # A body that takes longer is refused.
    body_within_s: Constant[float] = 30.0
    # All bodies being read at once, 16 of the longest, shared by the tenants that have any.
    bodies_limit_bytes: Constant[int] = 128 * 1024 * 1024
    # Lines of batches under way at the gateway that runs them: they fill a few replicas. Their
    # bodies are bounded as those above.
    batch_requests_limit: Constant[int] = 256
    # Files of one tenant: each upload reads the entries of all, which takes 0.2 s at the limit.
    tenant_files_limit: Constant[int] = 5_000
    # Uploads at once; each keeps 1 MiB at most.
    uploads_limit: Constant[int] = 16
    # A file that takes longer to upload is refused.
    upload_within_s: Constant[float] = 600.0
    # A client that reads nothing for this long has hung up.
    stall_s: Constant[float] = 60.0
    # The longest wait for an admission to store a request: brokers elect a leader within 5 s.
    submit_s: Constant[float] = 10.0
    # A silent stream gets a comment this often, so that proxies keep it open.
    keepalive_s: Constant[float] = 15.0
    # A replica whose digest is older does not count.
    fresh_s: Constant[float] = 2.0
    # The longest file; 200 MiB, as OpenAI's for a batch.
    file_limit_bytes: Constant[int] = 200 * 1024 * 1024

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key come together")
        for origin in self.cors_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"cors_origins: `{origin}` is no origin, such as https://chat.example.com:8443"
                )
        if not (self._has_keys or self.without_keys or is_loopback(self.host)):
            raise ValueError(
                f"without keys only loopback is served, and {self.host} is another address. "
                "Make a key with `slackline key TENANT FILE` and set SLACKLINE_GATEWAY_KEYS=FILE. "
                "SLACKLINE_GATEWAY_WITHOUT_KEYS=true serves everybody who reaches the address"
            )

    def beside_keys(self) -> str | None:
        """The consequences of keys, in words for the operator; None without keys."""
        if not self._has_keys:
            return None
        on = "opens with console_keys" if self.console_keys else "is off without console_keys"
        return f"gateway: there are keys, so a caller without one gets 401, and the console {on}"

    @property
    def _has_keys(self) -> bool:
        return bool(self.keys) or any(
            tenant.keys for tenant in read_tenants(self.tenants).tenants.values()
        )


def is_loopback(host: str) -> bool:
    """Tells whether only this machine reaches the address."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name
        return False
