"""The settings of admission: section `admission`, or SLACKLINE_ADMISSION_<FIELD>."""

import msgspec

from shared.policy import registry


class AdmissionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str = "nats://127.0.0.1:4222"
    creds: str = ""  # file of its seed (or JWT and seed) at NATS; empty: it logs in without
    tls_ca: str = ""  # file of the authority to trust at NATS; empty: those of the system
    policy: str = registry.DEFAULT  # whose router places requests
    settings: dict[str, str] = {}  # of the policy
    tiers: str = ""  # name of a tier set, or a file; empty: the default set
    tenants: str = ""  # file of the limits of tenants; empty: none has any
    model: str = ""  # folder of the tokenizer; empty: the built-in byte-level one
    hop_limit: int = 4  # offers of one request before it is best-effort
    homeless_s: float = 10.0  # a request is relegated if no replica is up for this long
    # requests under way at once; beyond this, requests are refused with a Retry-After
    open_limit: int = 20_000
    receive_limit: int = 256  # of them, those that are not stored yet
    # all messages of those together, as sent; read, a prompt of token ids takes up to nine times
    # as much. A single one may be larger
    receive_limit_bytes: int = 32 * 1024 * 1024
    # best-effort requests that wait, shared alike by the tenants that have any
    pool_limit: int = 20_000
    lost_s: float = 3.0  # a worker silent for this long is fenced
    sweep_s: float = 15.0  # between two sweeps of the open records
    lost_limit: int = 5  # attempts whose replica was lost before a request is failed
    drain_s: float = 10.0
