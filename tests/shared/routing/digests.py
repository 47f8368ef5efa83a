"""Digests and offers made by hand."""

from shared.schemas import Digest, Offer
from shared.vocabulary import ReplicaId, RequestKey, ServiceClass, Slo

NOW = 1000.0


def digest(replica: str, **more: object) -> Digest:
    values: dict[str, object] = {
        "replica": ReplicaId(replica),
        "incarnation": "i",
        "planner": "p",
        "at_unix_s": NOW,
        "model": "m",
        "pool": "",
        "waiting": 0,
        "running": 0,
        "best_effort": 0,
        "waiting_prefill_tokens": 0,
        "backlog_s": 0.0,
        "kv_blocks": 1000,
        "kv_free_blocks": 1000,
        "free_slots": 8,
        "surplus": True,
    }
    return Digest(**{**values, **more})  # type: ignore[arg-type]


def fleet(*digests: Digest) -> dict[ReplicaId, Digest]:
    return {d.replica: d for d in digests}


def offer(**more: object) -> Offer:
    values: dict[str, object] = {
        "key": RequestKey("t.r"),
        "attempt": 1,
        "service_class": ServiceClass.STANDARD,
        "tier": "interactive",
        "slo": Slo(ttft_s=2.0, tbt_s=0.05),
        "importance": 1.0,
        "application": "",
        "arrived_unix_s": NOW,
        "prompt_tokens": 100,
        "max_tokens": 100,
    }
    return Offer(**{**values, **more})  # type: ignore[arg-type]
