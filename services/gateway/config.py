"""The gateway's settings: section `gateway` of the configuration file, or
SLACKLINE_GATEWAY_<FIELD>.
"""

from ipaddress import ip_address

from msgspec import Struct


class GatewayConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str = "nats://127.0.0.1:4222"
    creds: str = ""  # file of its seed (or JWT and seed) at NATS; empty: it logs in without
    tls_ca: str = ""  # file of the authority to trust at NATS; empty: those of the system
    host: str = "127.0.0.1"
    port: int = 8080  # 0: any free port; the log states it
    keys: str = ""  # a file of keys, which `slackline key` makes; then every request needs one
    # serve another address than loopback without keys: for a port that is published on loopback
    without_keys: bool = False
    tls_cert: str = ""  # a file with the certificate and those that sign it, in PEM; "": no TLS
    tls_key: str = ""  # the file of its key
    # NATS carries 8 MiB in one message; 64 KiB are for the other fields. The same prompt is never
    # longer in msgpack than in JSON.
    body_limit_bytes: int = 8 * 1024 * 1024 - 64 * 1024
    head_within_s: float = 15.0  # a connection whose head takes longer is closed
    body_within_s: float = 30.0  # a body that takes longer is refused
    # all bodies being read at one time: 16 of the longest
    bodies_limit_bytes: int = 128 * 1024 * 1024
    requests_limit: int = 4096  # unfinished at one time; about 50 KiB each with its socket, 200 MiB
    # lines of batches under way at the gateway that runs them: they fill a few replicas. Their
    # bodies are bounded as those above
    batch_requests_limit: int = 256
    file_limit_bytes: int = 200 * 1024 * 1024  # as OpenAI's for a batch
    # all files of one tenant, so that no tenant fills the bucket of 2 GiB
    tenant_files_bytes: int = 512 * 1024 * 1024
    uploads_limit: int = 16  # at one time; each keeps 1 MiB at most
    upload_within_s: float = 600.0
    stall_s: float = 60.0  # a client that reads nothing for this long has hung up
    submit_s: float = 3.0  # how long to wait for an admission service to answer
    tiers: str = "default"  # a built-in set of tiers, or the path of one
    # a silent stream gets a comment this often, so that proxies keep it open
    keepalive_s: float = 15.0
    fresh_s: float = 2.0  # a replica whose digest is older does not count
    drain_s: float = 30.0  # longest stop before running streams are cut

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("tls_cert and tls_key come together")
        if not (self.keys or self.without_keys or _is_loopback(self.host)):
            raise ValueError(
                f"without keys only loopback is served, and {self.host} is another address. "
                "Make a key with `slackline key TENANT FILE` and set SLACKLINE_GATEWAY_KEYS=FILE. "
                "SLACKLINE_GATEWAY_WITHOUT_KEYS=true serves everybody who reaches the address"
            )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name
        return False
