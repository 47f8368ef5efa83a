"""The gateway's settings: section `gateway` of the configuration file, or
SLACKLINE_GATEWAY_<FIELD>.
"""

from msgspec import Struct


class GatewayConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str = "nats://127.0.0.1:4222"
    host: str = "127.0.0.1"
    port: int = 8080  # 0: any free one; the log says which
    # What NATS carries in one message (8 MiB), less 64 KiB for the other fields: the same prompt is
    # never longer in msgpack.
    body_limit_bytes: int = 8 * 1024 * 1024 - 64 * 1024
    body_within_s: float = 30.0  # a body that trickles in for longer is refused
    # of all bodies being read at one time: 16 of the longest
    bodies_limit_bytes: int = 128 * 1024 * 1024
    requests_limit: int = 4096  # unfinished at one time; about 50 KiB each with its socket, 200 MiB
    stall_s: float = 60.0  # a client that reads nothing for so long has hung up
    submit_s: float = 3.0  # how long to ask for an admission service that does not answer
    tiers: str = "default"  # a built-in set of tiers, or the path of one
    # a comment on silent streams, so that proxies do not take them for dead
    keepalive_s: float = 15.0
    fresh_s: float = 2.0  # a replica whose digest is older does not count
    drain_s: float = 30.0  # longest stop before running streams are cut
