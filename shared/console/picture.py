"""The picture of a fleet for `/console`, `slackline top` and `status`. null means not known. Rows
that come often are arrays in JSON: the page reads them by the order of their fields.
"""

from msgspec import Struct

from shared.core.record.explanation import WORDS
from shared.schemas import Explanation, ReplicasNeeded
from shared.vocabulary import ReplicaId, RequestKey, Slo


class Iteration(Struct, frozen=True, array_like=True):
    """One iteration as it ran. `n`: of all replicas; `predicted_s` 0: its plan was not heard."""

    n: int
    ended_unix_s: float
    exec_s: float
    predicted_s: float
    idle_s: float  # before it, while the engine held work and had no plan
    prefill_tokens: int
    decode_tokens: int
    draft_tokens: int


class ReplicaPicture(Struct, frozen=True, kw_only=True):
    """One replica. `slack` counts its standard requests by slack (shared/console/slack.py)."""

    name: ReplicaId
    model: str
    pool: str
    engine: str
    profile: str
    planner: str
    role: str
    accepting: bool
    heard_s: float  # since its newest digest
    kv_blocks: int
    kv_free_blocks: int
    waiting: int
    running: int
    best_effort: int
    backlog_s: float
    tokens_s: float
    busy: float  # part of the last seconds in which its engine computed
    slack: list[int]
    iterations: list[Iteration]


class Quantiles(Struct, frozen=True, kw_only=True):
    """Seconds, within 5 %; None where nothing was measured."""

    p50_s: float | None = None
    p99_s: float | None = None


class TierPicture(Struct, frozen=True, kw_only=True):
    """One tier over the window. `offered` counts ends: those that met their SLO, those that missed
    it by the bound that was broken, and those refused at the door (in `missed`, as `refused`).
    """

    name: str
    slo: Slo | None
    offered: int
    met: int
    missed: dict[str, int]
    relegated: int
    ttft: Quantiles
    tbt: Quantiles
    ttlt: Quantiles
    waiting: int
    running: int
    # part that met their SLO in each of the last parts of the window, oldest first
    history: list[float | None]


class RequestRow(Struct, frozen=True, array_like=True):
    """One request that a replica holds. `phase`: waiting, prefill or decode."""

    key: RequestKey
    tier: str
    replica: ReplicaId
    phase: str
    best_effort: bool
    age_s: float
    prompt_tokens: int
    computed_tokens: int
    generated_tokens: int
    max_tokens: int
    slack_s: float | None


class Picture(Struct, frozen=True, kw_only=True):
    """The fleet at one instant. `newest`: iterations so far, for the next question to name."""

    at_unix_s: float
    since_unix_s: float  # when the collector began to listen
    window_s: float
    newest: int
    tiers: list[TierPicture]
    replicas: list[ReplicaPicture]
    requests: list[RequestRow]  # those with least slack
    held: int  # requests that replicas hold
    pool_requests: int  # in the best-effort pool
    needed: list[ReplicasNeeded]  # of each model, with the reason
    slack_edges_s: list[float]


class LifeEvent(Struct, frozen=True, array_like=True):
    """A step in the life of a request, seconds after its arrival."""

    at_s: float
    what: str


class LifePicture(Struct, frozen=True, kw_only=True):
    """The life of one request, as it was heard; all times are seconds after its arrival."""

    key: RequestKey
    tier: str
    slo: Slo | None
    best_effort: bool
    replica: ReplicaId
    arrived_unix_s: float
    at_s: float
    prompt_tokens: int
    max_tokens: int
    computed_tokens: int
    generated_tokens: int
    slack_s: float | None
    whole: bool  # it was heard from its beginning
    events: list[LifeEvent]
    chunks: list[tuple[float, int]]  # when, how many prompt tokens
    tokens: list[tuple[float, int]]  # when, how many output tokens
    ended: str
    slo_met: bool | None
    missed: str
    ttft_s: float | None
    worst_tbt_s: float | None
    ttlt_s: float | None


class WhyPicture(Struct, frozen=True, kw_only=True):
    """Why a request was late, or where its time goes."""

    answer: str  # one sentence
    until_late: bool  # the shares are of the time until its first late token; else of its life
    shares: list[tuple[str, float, float]]  # cause, seconds, part of that time


def why_picture(found: Explanation) -> WhyPicture:
    late = bool(found.shares_until_missed)
    shares = found.shares_until_missed if late else found.shares
    return WhyPicture(
        answer=found.answer,
        until_late=late,
        shares=[(WORDS[each.cause], each.seconds, each.share) for each in shares],
    )
