"""Makes digests (the state of replicas, as routers see it) and offers for the routing tests."""

from shared.schemas import Digest, Offer
from shared.vocabulary import ReplicaId, Slo
from tests import made

NOW = 1000.0


def digest(replica: str, **more: object) -> Digest:
    values = {"at_unix_s": NOW, "kv_blocks": 1000, "kv_free_blocks": 1000, **more}
    return made.digest(replica, **values)


def fleet(*digests: Digest) -> dict[ReplicaId, Digest]:
    return {d.replica: d for d in digests}


def offer(**more: object) -> Offer:
    slo = Slo(ttft_s=2.0, tbt_s=0.05)
    values = {"arrived_unix_s": NOW, "prompt_tokens": 100, "max_tokens": 100, "slo": slo, **more}
    return made.offer("t.r", **values)
