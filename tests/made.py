"""Makes messages, records and other values for tests. A test names the values that matter to it;
the others have the defaults below.
"""

from collections.abc import Sequence
from typing import Any

from services.worker.core.worker import WorkerCore
from services.worker.engine import EngineFacts
from shared.columns import pack
from shared.schemas import (
    Announce,
    BatchPlan,
    Body,
    Digest,
    Hold,
    Offer,
    OfferAccepted,
    PlanAck,
    Record,
    Verdict,
)
from shared.vocabulary import FinishReason, RecordState, ReplicaId, RequestKey, ServiceClass, Slo

PROFILE = "a100-llama3-8b"


def announce(replica: str = "r1", **more: Any) -> Announce:
    """The heartbeat of a worker whose engine has no special features."""
    usual: dict[str, Any] = {
        "incarnation": "i", "at_unix_s": 0.0, "model": "m", "engine": "sim", "profile": PROFILE,
        "pool": "", "kv_blocks": 100, "block_tokens": 16, "context_tokens": 1000, "max_slots": 8,
        "epoch": 0,
    }  # fmt: skip
    return Announce(replica=ReplicaId(replica), **{**usual, **more})


def engine_facts(**more: Any) -> EngineFacts:
    usual: dict[str, Any] = {
        "engine": "sim", "model": "m", "profile": PROFILE, "kv_blocks": 64, "block_tokens": 16,
        "context_tokens": 256, "max_slots": 8, "vocabulary": 300, "eos_token_ids": frozenset(),
    }  # fmt: skip
    return EngineFacts(**{**usual, **more})


def worker_core(replica: str = "r1", incarnation: str = "i", **more: Any) -> WorkerCore:
    """The core of a worker that holds nothing and obeys the planner of epoch 1."""
    usual: dict[str, Any] = {
        "kv_blocks": 100, "block_tokens": 16, "context_tokens": 1000, "max_slots": 8,
    }  # fmt: skip
    core = WorkerCore(ReplicaId(replica), incarnation, **{**usual, **more})
    core.resync(1, 1)
    return core


def hold(core: WorkerCore, slot: int, record: Record, body: Body, **more: Any) -> None:
    """Have the worker take in a request that was placed with it, as its planner asks."""
    asked = Hold(epoch=1, sync=1, slot=slot, key=record.key, attempt=record.attempt)
    assert core.hold(asked, record, body, **{"now_unix_s": 0.0, **more}) == OfferAccepted()


def digest(replica: str = "r1", **more: Any) -> Digest:
    """The digest of a replica that has nothing to do."""
    usual: dict[str, Any] = {
        "incarnation": "i", "planner": "p", "at_unix_s": 0.0, "model": "m", "pool": "",
        "waiting": 0, "running": 0, "best_effort": 0, "waiting_prefill_tokens": 0,
        "backlog_s": 0.0, "kv_blocks": 100, "kv_free_blocks": 100, "free_slots": 8,
        "surplus": True,
    }  # fmt: skip
    return Digest(replica=ReplicaId(replica), **{**usual, **more})


def record(key: str = "t.q", **more: Any) -> Record:
    """A request that has just been accepted, at instant 0."""
    usual: dict[str, Any] = {
        "body_key": "b", "owner": "a", "state": RecordState.ACTIVE, "attempt": 0, "tier": "chat",
        "application": "", "service_class": ServiceClass.STANDARD, "slo": Slo(ttft_s=1.0),
        "importance": 1.0, "session": "", "arrived_unix_s": 0.0, "expires_unix_s": 1e12,
        "prompt_tokens": 10, "max_tokens": 10, "stream_subject": "s",
    }  # fmt: skip
    return Record(key=RequestKey(key), **{**usual, **more})


def offer(key: str = "t.q", **more: Any) -> Offer:
    usual: dict[str, Any] = {
        "attempt": 1, "service_class": ServiceClass.STANDARD, "tier": "chat",
        "slo": Slo(ttft_s=1.0), "importance": 1.0, "application": "", "arrived_unix_s": 0.0,
        "prompt_tokens": 10, "max_tokens": 10,
    }  # fmt: skip
    return Offer(key=RequestKey(key), **{**usual, **more})


def plan(slots: Sequence[int] = (), caps: Sequence[int] = (), **more: Any) -> BatchPlan:
    usual: dict[str, Any] = {
        "replica": ReplicaId("r1"), "incarnation": "i", "epoch": 1, "sync": 1, "seq": 1,
        "predicted_s": 0.01,
    }  # fmt: skip
    return BatchPlan(slots=pack(slots), caps=pack(caps), **{**usual, **more})


def ack(did: dict[int, tuple[int, int]] | None = None, **more: Any) -> PlanAck:
    """`did`: computed and emitted tokens by slot."""
    did = did or {}
    usual: dict[str, Any] = {
        "replica": ReplicaId("r1"), "incarnation": "i", "epoch": 1, "plan_seq": 1, "ack_seq": 1,
        "slots": pack(list(did)), "computed": pack([computed for computed, _ in did.values()]),
        "emitted": pack([emitted for _, emitted in did.values()]),
    }  # fmt: skip
    return PlanAck(**{**usual, **more})


def verdict(**more: Any) -> Verdict:
    """A request that met its SLO."""
    usual: dict[str, Any] = {
        "finish_reason": FinishReason.STOP, "slo_met": True, "relegated": False,
        "service_class": ServiceClass.STANDARD, "prompt_tokens": 10, "output_tokens": 5,
        "attempts": 1, "ttft_s": None, "worst_tbt_s": None, "mean_tpot_s": None, "ttlt_s": None,
        "ended_unix_s": 0.0,
    }  # fmt: skip
    return Verdict(**{**usual, **more})
