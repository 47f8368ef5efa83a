"""Makes messages as a fleet sends them, for tests of the console."""

from typing import Any

from shared.schemas import Announce, BatchPlan, Digest, Ended, Held, PlanAck, RosterEntry
from shared.vocabulary import Missed, ReplicaId, RequestKey, ServiceClass, Slo
from tests import made

R1 = ReplicaId("r1")
CHAT = Slo(ttft_s=1.0, tbt_s=0.1)
NOW = 1_700_000_000.0


def digest(replica: str = R1, **facts: Any) -> Digest:
    usual: dict[str, Any] = {
        "at_unix_s": NOW, "waiting": 1, "running": 2, "best_effort": 3, "backlog_s": 0.5,
        "kv_free_blocks": 40, "free_slots": 9,
    }  # fmt: skip
    return made.digest(replica, **{**usual, **facts})


def announce(replica: str = R1, **facts: Any) -> Announce:
    usual: dict[str, Any] = {
        "at_unix_s": NOW, "profile": "f", "context_tokens": 8192, "max_slots": 64, "epoch": 1,
    }  # fmt: skip
    return made.announce(replica, **{**usual, **facts})


def plan(seq: int, predicted_s: float, replica: str = R1) -> BatchPlan:
    return made.plan(replica=ReplicaId(replica), seq=seq, predicted_s=predicted_s)


def held(slot: int, key: str, **facts: Any) -> Held:
    return Held(slot=slot, key=RequestKey(key), attempt=facts.pop("attempt", 1), **facts)


def ack(
    seq: int,
    at_unix_s: float,
    did: dict[int, tuple[int, int]] | None = None,
    replica: str = R1,
    **facts: Any,
) -> PlanAck:
    """`did`: computed and emitted tokens by slot."""
    usual: dict[str, Any] = {
        "replica": ReplicaId(replica), "plan_seq": seq, "ack_seq": seq, "exec_s": 0.02,
        "started_unix_s": at_unix_s - 0.02, "ended_unix_s": at_unix_s,
    }  # fmt: skip
    return made.ack(did, **{**usual, **facts})


def entry(slot: int, key: str, **facts: Any) -> RosterEntry:
    usual: dict[str, Any] = {
        "attempt": 1, "service_class": ServiceClass.STANDARD, "tier": "chat", "slo": CHAT,
        "arrived_unix_s": NOW, "prompt_tokens": 10, "max_tokens": 100, "computed_tokens": 0,
        "generated_tokens": 0, "next_due_unix_s": NOW + 1.0,
    }  # fmt: skip
    return RosterEntry(slot=slot, key=RequestKey(key), **{**usual, **facts})


def ended(key: str, met: bool = True, tier: str = "chat", **facts: Any) -> Ended:
    usual: dict[str, Any] = {
        "slo_met": met, "ttft_s": 0.4, "worst_tbt_s": 0.05, "mean_tpot_s": 0.04, "ttlt_s": 2.0,
        "ended_unix_s": NOW + 2.0, "missed": Missed.NOTHING if met else Missed.TTFT,
    }  # fmt: skip
    return Ended(
        tier=tier,
        key=RequestKey(key),
        slo=CHAT,
        arrived_unix_s=NOW,
        verdict=made.verdict(**{**usual, **facts}),
    )
