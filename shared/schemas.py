"""Everything that crosses NATS. Frozen, tagged where a subject carries more than one kind; new
fields carry defaults.

Arrays of slots, tokens and counts are little-endian int32 bytes (shared/columns.py). Subjects are
in shared/subjects.py.
"""

import math
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from shared.perf.profile_file import ProfileFile
from shared.structured import Structured
from shared.vocabulary import (
    FinishReason,
    Measure,
    RecordState,
    ReplicaId,
    RequestKey,
    ServiceClass,
    Slo,
)

Count = Annotated[int, Meta(ge=0)]
ShortText = Annotated[str, Meta(max_length=128)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
# JSON may bring more, which msgpack cannot store
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

# ---------------------------------------------------------------- client <-> admission


class Sampling(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How tokens are drawn and when the output ends. temperature 0 is greedy. Not every engine has
    all of it: shared/features.py.
    """

    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 256
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=1_000_000)] = 0  # 0: all
    seed: Int64 | None = None  # None: derived from the request's key
    stop: Annotated[list[Annotated[str, Meta(max_length=256)]], Meta(max_length=16)] = field(
        default_factory=list
    )
    stop_token_ids: Annotated[list[Int64], Meta(max_length=64)] = field(default_factory=list)
    ignore_eos: bool = False
    # alternatives to tell with each token; None: tell nothing
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    # tokens less likely than this share of the likeliest one are not drawn
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    # before these no stop token is drawn and no stop string heeded
    min_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    # off the logit of each token of the output so far
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    # likewise, for each time it is there
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    # divides (below 0: multiplies) the logits of prompt and output
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    # added to logits
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=300)] = field(default_factory=dict)
    structured: Structured | None = None  # what the output must be
    # Stands for the model's own end of sequence when a trace is replayed: the worker stops there,
    # no planner sees it.
    output_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    # Likewise for the end-of-thinking token: so many of its tokens are thinking. Only an SLO that
    # names thinking_tbt_s heeds it.
    thinking_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None


class GenerateRequest(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One request, on slo.v1.requests.<tier>. Exactly one of prompt, messages, token_ids."""

    request_id: str
    tenant: str = "default"
    model: ShortText | None = None  # the model's name, or an adapter's
    # by this LoRA adapter; "": by the model itself, if `model` names no adapter
    adapter: ShortText = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[int] | None = None
    sampling: Sampling = Sampling()
    slo: Slo | None = None  # None: the tier's
    importance: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    application: ShortText = ""  # whose decode-length history predicts this one
    session: ShortText = ""
    allow_relegation: bool = True  # False: refused with a Retry-After rather than served late
    # longest it may stay unfinished, at most a year
    expires_s: Annotated[float, Meta(gt=0, le=31_536_000)] = 172_800.0
    inbox: str | None = None  # a subject under _INBOX. for the events instead of the derived one


class Received(Struct, frozen=True, kw_only=True, tag="received"):
    """Admission has stored the request; its events come on `stream_subject`."""

    request_id: str
    stream_subject: str
    arrived_unix_s: float
    prompt_tokens: int
    attached: bool = False  # True: this id was already here; nothing was started


class Refused(Struct, frozen=True, kw_only=True, tag="refused"):
    """A clear no, to whoever asked. `code` as in the OpenAI error envelope."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class Attach(Struct, frozen=True, kw_only=True):
    """Ask what a request has produced so far, from token `from_token` on. Answered by Replay or
    Refused.
    """

    tenant: str = "default"
    request_id: str
    from_token: Count = 0


class Verdict(Struct, frozen=True, kw_only=True):
    """How one request ended: exactly one per request. Times are seconds; attainment by the
    `deadline` definition.
    """

    finish_reason: FinishReason
    slo_met: bool
    relegated: bool  # was ever best-effort
    service_class: ServiceClass  # at the end
    prompt_tokens: int
    output_tokens: int
    attempts: int
    ttft_s: float | None
    worst_tbt_s: float | None
    mean_tpot_s: float | None
    ttlt_s: float | None
    ended_unix_s: float
    replica: ReplicaId | None = None
    message: str = ""
    retry_after_s: float | None = None
    thinking_tokens: int = 0  # of the output; only where the SLO names a pace for thinking
    thinking_tpot_s: float | None = None  # mean time per token of these after the first


class Likelihood(Struct, frozen=True, array_like=True):
    """One token and its natural log-probability under the model, before temperature and cuts.
    `piece`: its bytes (base64 in JSON).
    """

    token: int
    piece: bytes
    logprob: float


class TokenLogprob(Struct, frozen=True, array_like=True):
    """What was known of one output token; `top` is as long as asked for, likeliest first."""

    chosen: Likelihood
    top: list[Likelihood] = []


class Replay(Struct, frozen=True, kw_only=True, tag="replay"):
    """The answer to Attach: tokens and text from `offset` on (the client's from_token), and the
    verdict if it ended.
    """

    stream_subject: str
    offset: int
    tokens: list[int]
    text: str
    text_offset: int
    verdict: Verdict | None = None
    logprobs: list[TokenLogprob] = []  # along `tokens`, or empty


class Delta(Struct, frozen=True, kw_only=True, tag="delta"):
    """New tokens of one request. `offset` counts the tokens before these, `text_offset` the
    characters.

    Readers drop what they have, and attach on a gap.
    """

    attempt: int
    offset: int
    tokens: list[int]
    text: str
    text_offset: int
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = []  # along `tokens`, or empty


class Status(Struct, frozen=True, kw_only=True, tag="status"):
    """What became of a request on its way: accepted, relegated, promoted or replaced (moved to
    another replica).
    """

    state: str
    service_class: ServiceClass
    attempt: int
    replica: ReplicaId | None = None
    reason: str = ""


class End(Struct, frozen=True, kw_only=True, tag="end"):
    """The last event of every request. `tokens` lets a reader see that it has them all."""

    verdict: Verdict


StreamEvent = Delta | Status | End

# ---------------------------------------------------------------- durable records (KV `requests`)


class Body(Struct, frozen=True, kw_only=True):
    """The heavy, unchanging part of a request, stored once under its own key."""

    prompt: bytes  # token ids, int32
    sampling: Sampling
    adapter: str = ""


class Resume(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What earlier attempts produced and the client may have seen: the next one goes on from
    here.
    """

    tokens: bytes = b""  # int32
    text: str = ""
    measure: Measure = Measure()
    logprobs: list[TokenLogprob] = []  # along `tokens`, or empty


class Record(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The only truth about who has a request. Changed by compare-and-set alone; ended when it has a
    verdict.
    """

    key: RequestKey
    body_key: str
    owner: str  # the admission or relegation instance that places it
    state: RecordState
    attempt: int
    service_class: ServiceClass
    tier: str
    slo: Slo
    importance: float
    application: str
    session: str
    arrived_unix_s: float
    expires_unix_s: float
    prompt_tokens: int
    max_tokens: int
    stream_subject: str
    json: bool = False  # the client speaks JSON
    allow_relegation: bool = True
    replica: ReplicaId | None = None
    incarnation: str = ""
    resume: Resume = Resume()
    relegated: bool = False  # ever
    left: str = ""  # why its last replica gave it up
    # attempts whose replica was lost: a request that breaks engines must not go round for ever
    lost: int = 0
    cancelled: bool = False  # tombstone
    traceparent: str = ""
    verdict: Verdict | None = None
    output_key: str = ""  # where what it made is, once it has ended
    needs: tuple[str, ...] = ()  # what its replica must have, sorted (shared/features.py)


# ---------------------------------------------------------------- admission <-> planner


class Offer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Would you hold this request's SLO? Everything a policy may know about a request, and not its
    prompt.
    """

    key: RequestKey
    attempt: int
    service_class: ServiceClass
    tier: str
    slo: Slo
    importance: float
    application: str
    arrived_unix_s: float
    prompt_tokens: int
    max_tokens: int
    generated_tokens: int = 0  # by earlier attempts; their KV is computed again
    next_due_unix_s: float = math.inf  # deadline of the next owed token
    expires_unix_s: float = math.inf
    session: str = ""
    allow_relegation: bool = True
    first_token_unix_s: float = math.inf  # when its first token came; inf before
    # why its last replica gave it up ("offloaded", "drained", ...); empty if none has had it
    left: str = ""
    # of one whose SLO names a pace for thinking: it has ended, so `tbt_s` is its pace
    answering: bool = False
    body_key: str = ""  # for the worker that is to hold it
    needs: tuple[str, ...] = ()  # what its replica must have

    @property
    def thinking(self) -> bool:
        """Its next token is one of the thinking stage, as far as is known."""
        return self.slo.thinks and not self.answering


class OfferAccepted(Struct, frozen=True, kw_only=True, tag="accepted"):
    """The worker holds the request, prompt included."""

    reason: str = ""


class OfferDeclined(Struct, frozen=True, kw_only=True, tag="declined"):
    """The replica does not hold it, for certain; `earliest_s` from now it could meet the SLO."""

    reason: str = ""
    earliest_s: float | None = None


class OfferNotReady(Struct, frozen=True, kw_only=True, tag="not_ready"):
    """Nobody decided: the replica has no planner or worker just now, or they resync. Ask again."""

    reason: str = ""


class OfferInDoubt(Struct, frozen=True, kw_only=True, tag="in_doubt"):
    """The worker may hold it: withdraw the attempt before the request goes elsewhere."""

    reason: str = ""


OfferAnswer = OfferAccepted | OfferDeclined | OfferNotReady | OfferInDoubt


class Digest(Struct, frozen=True, kw_only=True):
    """What routers may know of a replica: published by its planner, at most 100 ms old when all is
    well.
    """

    replica: ReplicaId
    incarnation: str
    planner: str
    at_unix_s: float
    model: str
    pool: str
    waiting: int  # standard requests whose prefill has not ended
    running: int  # standard decodes
    best_effort: int
    waiting_prefill_tokens: int  # standard, not yet computed
    backlog_s: float  # predicted seconds until the standard prefills queued now are done
    kv_blocks: int
    kv_free_blocks: int  # after what is held has been computed
    free_slots: int
    surplus: bool  # would take best-effort work now
    block_tokens: int = 16  # of one KV block
    accepting: bool = True
    features: list[str] = []  # what its engine can do (shared/features.py)
    adapters: list[str] = []


# ---------------------------------------------------------------- planner <-> worker


class Announce(Struct, frozen=True, kw_only=True):
    """A worker's heartbeat and its engine's facts."""

    replica: ReplicaId
    incarnation: str
    at_unix_s: float
    model: str
    engine: str
    profile: str  # name of a shipped profile, or a path; of `fitted`, where that is given
    pool: str
    kv_blocks: int
    block_tokens: int
    context_tokens: int
    max_slots: int
    epoch: int  # the highest seen
    ack_seq: int = 0  # of the newest ack it has stored: a planner that has not heard it missed one
    draining: bool = False
    # what the worker measured of its engine; shared/core/announced.py judges it
    fitted: ProfileFile | None = None
    # what an iteration of its draft model takes, as a fraction of the profile; 0: it has none
    draft: float = 0.0
    features: list[str] = []  # what it can do that not every engine can (shared/features.py)
    adapters: list[str] = []  # LoRA adapters it has loaded


class Hold(Struct, frozen=True, kw_only=True):
    """Take this attempt in under this slot. The worker reads record and body from the store and
    checks them.
    """

    epoch: int
    sync: int
    slot: int
    key: RequestKey
    attempt: int
    # so that both can be read at once; the record decides whether it is the right one
    body_key: str = ""


class HoldAccepted(Struct, frozen=True, kw_only=True, tag="accepted"):
    """The worker holds the attempt under this slot."""


class HoldDeclined(Struct, frozen=True, kw_only=True, tag="declined"):
    """The worker does not hold the attempt."""

    reason: str


class HoldInDoubt(Struct, frozen=True, kw_only=True, tag="in_doubt"):
    """The planner's picture of the worker is wrong: only a resync tells what the worker holds."""

    reason: str


HoldAnswer = HoldAccepted | HoldDeclined | HoldInDoubt


class Selection(Struct, frozen=True, kw_only=True):
    """Speculation of one plan. The worker drafts, then a pure function of the policy picks what is
    verified.

    Columns run along the plan's entries. `cap` of a speculating entry counts its verified tokens,
    the root included.
    """

    # "chain" (first cap-1 drafts) or the name of a tree selection (shared/policy/speculation.py)
    method: str
    depth: bytes  # int32: draft steps of each entry; 0: it does not speculate
    width: bytes  # int32: beam width of each entry
    needed: bytes  # float32: tokens that must be accepted to keep the pace (AdaServe A(r))
    budget_tokens: int  # verified by all entries together
    needed_limit_tokens: int = 1 << 30  # by one entry for its own need (AdaServe n_max)


class BatchPlan(Struct, frozen=True, kw_only=True):
    """What one replica may run in one iteration. Entries are caps, in order; `seq` has no holes
    within an epoch.

    Order within a plan: released, preempted and class changes take effect first, then entries run.
    """

    replica: ReplicaId
    incarnation: str
    epoch: int
    sync: int
    seq: int
    slots: bytes
    caps: bytes
    predicted_s: float
    released: bytes = b""  # slots whose attempt ends here; reasons in `released_why`
    released_why: list[str] = field(default_factory=list)
    preempted: bytes = b""  # slots whose KV goes, tokens kept
    relegated: bytes = b""  # slots that become best-effort
    promoted: bytes = b""  # slots that become standard again
    selection: Selection | None = None


class PlanRefused(Struct, frozen=True, kw_only=True):
    """The worker cannot run that plan: stale epoch, hole in seq, or another incarnation."""

    incarnation: str
    epoch: int
    expected_seq: int
    reason: str


class Held(Struct, frozen=True, kw_only=True):
    """A slot was given to an attempt; logged with the next ack. `resume` is where its tokens go on
    from.
    """

    slot: int
    key: RequestKey
    attempt: int
    offset: int = 0  # tokens made by earlier attempts
    text_offset: int = 0


class PlanAck(Struct, frozen=True, kw_only=True, tag="ack"):
    """What one iteration did. The entry of the ack log, and, once stored, the message to the
    planner.

    `slots`, `computed` (KV positions filled) and `emitted` (tokens) are parallel; `tokens` and
    `texts` follow `emitted`. An ack with plan_seq 0 carries ends that happened between iterations.
    `ack_seq` counts an incarnation's acks from 1, without holes: whoever misses one knows.
    """

    replica: ReplicaId
    incarnation: str
    epoch: int
    plan_seq: int
    ack_seq: int
    slots: bytes = b""
    computed: bytes = b""
    emitted: bytes = b""
    tokens: bytes = b""
    # one for each slot with emitted > 0 or ended here
    texts: list[str] = field(default_factory=list)
    # of the slots that asked for them, one for each of their tokens, in the order of `tokens`
    logprobs: list[TokenLogprob] = []
    logprob_slots: bytes = b""  # those slots
    # slot, FinishReason or why it was released
    ended: list[tuple[int, str]] = field(default_factory=list)
    # since the last ack, in force before the entries
    held: list[Held] = field(default_factory=list)
    preempted: bytes = b""
    relegated: bytes = b""
    promoted: bytes = b""
    skipped: bytes = b""  # planned, but already ended
    drafted: bytes = b""  # along slots: draft tokens verified
    cached: bytes = b""  # along slots: of `computed`, positions found in a prefix cache
    answering: bytes = b""  # slots whose thinking is over as of this ack
    # along those: how many of all its output tokens were thinking; 0: it never thought
    thinking_tokens: bytes = b""
    free_blocks: int = 0
    started_unix_s: float = 0.0
    ended_unix_s: float = 0.0
    exec_s: float = 0.0  # by the worker's monotonic clock
    outside_s: float = 0.0  # of that, not spent in the model and its sampling; 0: unknown
    idle_s: float = 0.0  # waited for this plan after the previous iteration, while holding work


class AttemptOver(Struct, frozen=True, kw_only=True):
    """An attempt left its replica, and its last token is in the log. Repeated until settled.

    `why` is a FinishReason, or `relegated` / `offloaded` / `drained` for an attempt that must go on
    elsewhere with `resume`.
    """

    key: RequestKey
    attempt: int
    replica: ReplicaId
    incarnation: str
    why: str
    relegated: bool  # ever
    service_class: ServiceClass
    resume: Resume
    message: str = ""


class SnapshotEntry(Struct, frozen=True, kw_only=True):
    held: Held
    tokens: bytes
    text: str
    measure: Measure
    service_class: ServiceClass
    relegated: bool = False  # ever
    logprobs: list[TokenLogprob] = []  # along `tokens`, or empty


class Snapshot(Struct, frozen=True, kw_only=True, tag="snapshot"):
    """All that the log before it said of attempts still held or not yet settled; the log may be
    trimmed up to here.
    """

    incarnation: str
    entries: list[SnapshotEntry]
    overs: list[AttemptOver]


class Registered(Struct, frozen=True, kw_only=True, tag="registered"):
    """A worker began under a new incarnation; whatever the log held before is lost to it."""

    incarnation: str


class Fenced(Struct, frozen=True, kw_only=True, tag="fenced"):
    """Someone declared this incarnation lost: its next append must fail."""

    incarnation: str
    by: str


LogEntry = PlanAck | Snapshot | Registered | Fenced


class Resync(Struct, frozen=True, kw_only=True):
    """A planner asks for the worker's state, page by page. The worker drops plans it has not begun
    and obeys `epoch` from here.

    `sync` numbers the resyncs of a lease: plans and holds that were sent before the newest one are
    refused.
    """

    epoch: int
    sync: int
    page: Count = 0


class ResyncEntry(Struct, frozen=True, kw_only=True):
    """One request as the worker has it. `computed_tokens` KV positions are filled, of prompt plus
    generated.
    """

    slot: int
    offer: Offer  # as it would be offered now
    computed_tokens: int
    generated_tokens: int
    draft_tokens: int = 0  # positions filled in the draft model's KV


class ResyncPage(Struct, frozen=True, kw_only=True):
    announce: Announce
    next_seq: int
    ack_seq: int  # of the newest ack whose effects are in the entries
    entries: list[ResyncEntry]
    more: bool


# ---------------------------------------------------------------- worker <-> admission


class Settled(Struct, frozen=True, kw_only=True):
    """The record says so; the worker may forget the attempt."""


class Withdraw(Struct, frozen=True, kw_only=True):
    """Let go of this attempt (and refuse it if it comes later)."""

    key: RequestKey
    attempt: int


class Withdrawn(Struct, frozen=True, kw_only=True):
    """`over` is what the attempt made, None if it never came here. Nothing more of it will be
    logged.
    """

    over: AttemptOver | None


class Holdings(Struct, frozen=True, kw_only=True):
    """Which of these (key, attempt) does the worker know, held or unsettled?"""

    asked: list[tuple[RequestKey, int]]


class HoldingsAnswer(Struct, frozen=True, kw_only=True):
    incarnation: str
    known: list[bool]


class Cancel(Struct, frozen=True, kw_only=True):
    """The client wants no more of it."""

    reason: str = "cancelled by the client"


class Hint(Struct, frozen=True, kw_only=True):
    """A record became `relegated`: look at it. Losing one costs only the wait for the next
    listing.
    """

    key: RequestKey


class LeaseValue(Struct, frozen=True, kw_only=True):
    holder: str
