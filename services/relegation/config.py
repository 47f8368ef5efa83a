"""The settings of relegation: section `relegation`, or SLACKLINE_RELEGATION_<FIELD>."""

import msgspec


class RelegationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str = "nats://127.0.0.1:4222"
    creds: str = ""  # file of its seed (or JWT and seed) at NATS; empty: it logs in without
    tls_ca: str = ""  # file of the authority to trust at NATS; empty: those of the system
    list_s: float = 10.0  # between listings of the records; hints come in between
    per_digest: int = 2  # requests handed to one replica before its next digest
    # an SLO counts as attainable if this many times the predicted time is left
    promote_margin: float = 2.0
    drain_s: float = 5.0
