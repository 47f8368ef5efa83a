"""Makes the policy SLOs-Serve with outputs seen, and rows and offers for it, for its tests."""

from collections.abc import Sequence

from shared.perf.shape import BatchShape
from shared.policy.seam import Ended, Observation, Phase, View
from shared.policy.slos_serve.policy import Settings, SlosServe
from shared.schemas import Offer
from shared.vocabulary import Slo
from tests import made
from tests.shared.policy.views import NOW, Row


def policy(*outputs: int, **changed: object) -> SlosServe:
    """A policy that has seen these outputs of application `a` end."""
    made = SlosServe(Settings(**changed))  # type: ignore[arg-type]
    made.observe(
        Observation(NOW, BatchShape(), 0.0, 0.0, [Ended("a", 100, 500, n) for n in outputs])
    )
    return made


def waiting(
    slot: int, *, tokens: int = 500, ttft_s: float = 1.0, tbt_s: float = 0.1, **more: object
) -> Row:
    return Row(**{"slot": slot, "target": tokens, "ttft_s": ttft_s, "tbt_s": tbt_s, **more})  # type: ignore[arg-type]


def decoding(
    slot: int, *, tbt_s: float = 0.05, context: int = 200, generated: int = 5, **more: object
) -> Row:
    values: dict[str, object] = {
        "phase": Phase.DECODE,
        "target": context,
        "computed": context,
        "generated": generated,
        "ttft_s": 1.0,
    }
    return Row(**{"slot": slot, "tbt_s": tbt_s, **values, **more})  # type: ignore[arg-type]


def offer(n: int = 0, *, tokens: int = 500, slo: Slo | None = None, **more: object) -> Offer:
    slo = slo or Slo(ttft_s=1.0, tbt_s=0.1)
    values = {
        "slo": slo, "application": "a", "arrived_unix_s": NOW, "prompt_tokens": tokens,
        "max_tokens": 400, "next_due_unix_s": slo.first_due_unix_s(NOW),
    }  # fmt: skip
    return made.offer(f"t.{n}", **{**values, **more})


def accepted(seen: View, offers: Sequence[Offer], by: SlosServe | None = None) -> list[bool]:
    return [answer.accepted for answer in (by or policy()).admit(seen, offers)]
