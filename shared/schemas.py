"""All messages and records that cross NATS, as structs, tagged where a subject has several kinds.
New fields have defaults. Arrays of numbers are little-endian int32 bytes (shared/columns.py).
"""

import math
from typing import Annotated, Any

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from shared.measure import Measure
from shared.perf.draft import DraftCost
from shared.perf.profile_file import ProfileFile
from shared.request_timeline import Cause, Happening, Neighbour, RequestTimeline
from shared.structured import Structured
from shared.vocabulary import (
    SHORTEST_S,
    Count,
    FinishReason,
    FromOne,
    Missed,
    RecordState,
    ReplicaId,
    RequestKey,
    Role,
    ServiceClass,
    Slo,
    SlotCount,
)

# Every integer that crosses the bus has bounds. Number is for what is counted up for as long as a
# fleet lives: epochs, sequences
Number = Annotated[int, Meta(ge=0, lt=2**53)]
# No NaN and no infinity: in a sum of times, or in an order, one of them would stay for ever
Importance = Annotated[float, Meta(ge=0, le=1e6)]
Weight = Annotated[float, Meta(gt=0, le=1e6)]
Finite = Annotated[float, Meta(ge=-1e12, le=1e12)]
Lasted = Annotated[float, Meta(ge=0, le=1e9)]
Sum = Annotated[float, Meta(ge=0, le=1e18)]
ShortText = Annotated[str, Meta(max_length=128)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
# JSON integers may be larger, but msgpack cannot store them
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

# ---------------------------------------------------------------- client <-> admission


class Sampling(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Drawing tokens, and ending the output. Temperature 0 is greedy. See shared/features.py."""

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
    # number of alternatives to send with each token; None: no log-probabilities at all
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    # a token is not drawn if its probability is below this share of the likeliest token's
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    # until the output has so many tokens, no stop token is drawn and stop strings are ignored
    min_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    # subtracted from the logit of each token that the output has so far
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    # subtracted once for each time the token occurs in the output
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    # divides (below 0: multiplies) the logits of tokens that prompt or output have
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    # added to logits
    logit_bias: Annotated[dict[TokenId, Bias], Meta(max_length=300)] = field(default_factory=dict)
    structured: Structured | None = None  # the format that the output must have
    # False: the text has special tokens by their names, save those that end it
    skip_special_tokens: bool = True
    # The output's length when a trace is replayed, in place of the model's own end of sequence: the
    # worker stops there; no planner sees it.
    output_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    # The number of thinking tokens when a trace is replayed, in place of the end-of-thinking token.
    # It counts only if the SLO names thinking_tbt_s.
    thinking_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None


class GenerateRequest(
    Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A request (slo.v1.requests.<tenant>.<tier>) with one of prompt, messages and token_ids."""

    request_id: str
    tenant: str = ""  # that of the subject; empty: taken from there
    model: ShortText | None = None  # the name of the model or of an adapter
    # the LoRA adapter to use; "": none, unless `model` names one
    adapter: ShortText = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    # with messages: tools in OpenAI's form, and variables of the chat template
    tools: list[dict[str, Any]] = field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    token_ids: list[Int64] | None = None
    sampling: Sampling = Sampling()
    slo: Slo | None = None  # None: the tier's
    importance: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    # requests of one application share the history that predicts output lengths
    application: ShortText = ""
    session: ShortText = ""
    # number of requests that make up one answer, this one included
    choices: Annotated[int, Meta(ge=1, le=1_000_000)] = 1
    allow_relegation: bool = True  # False: refused with a Retry-After rather than served late
    # longest time the request may stay unfinished, at most a year
    expires_s: Annotated[float, Meta(gt=0, le=31_536_000)] = 172_800.0
    # a subject under _INBOX.<tenant>. for the events; None: the derived subject
    inbox: str | None = None


class Thinking(Struct, frozen=True, kw_only=True):
    """The marks of an answer's thinking, which comes first, in its text."""

    end: str  # the mark that ends it, such as `</think>`
    begun: bool  # the prompt ends within it; otherwise the answer begins it with `<think>`


class Received(Struct, frozen=True, kw_only=True, tag="received"):
    """Admission has stored the request; its events are published on `stream_subject`."""

    request_id: str
    stream_subject: str
    arrived_unix_s: float
    prompt_tokens: Count
    # the form in which the model writes calls of tools (shared/text/tool_format.py)
    tool_format: str = ""
    thinking: Thinking | None = None  # None: the answer has none that its text can tell
    attached: bool = False  # True: a request with this id exists already; nothing was started
    tier: str = ""  # of the request, by its name: `auto` is resolved


class Refused(Struct, frozen=True, kw_only=True, tag="refused"):
    """A refusal, sent to the caller. `code` is that of the OpenAI error envelope."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class Attach(Struct, frozen=True, kw_only=True):
    """A reader asks for the output from token `from_token` on. The answer is Replay or Refused."""

    tenant: str = ""  # that of the subject; empty: taken from there
    request_id: str
    from_token: Count = 0


class FirstMissed(Struct, frozen=True, kw_only=True):
    """The first missed deadline, and the main cause. Times are in seconds since the arrival."""

    token: Count  # its number, from 1; 0: the end of the answer (TTLT)
    bound: Missed
    due_s: float
    came_s: float | None  # None: it did not come
    cause: Cause
    cause_s: float  # of the time until then, what went into that cause


class Tokenize(
    Struct,
    frozen=True,
    kw_only=True,
    tag="tokenize",
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """A client asks for the tokens of a prompt or of messages; Tokenized or Refused answers."""

    model: ShortText = ""  # whose tokens; empty: the model of a request that names none
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    # of a prompt: with the tokens that the model's tokenizer puts around it
    add_special_tokens: bool = True
    names: bool = False  # the answer has the vocabulary's name of each token, too


class Tokenized(Struct, frozen=True, kw_only=True, tag="tokenized"):
    tokens: list[TokenId]
    names: list[str] = field(default_factory=list)


class Detokenize(
    Struct,
    frozen=True,
    kw_only=True,
    tag="detokenize",
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """A client asks for the text of tokens. The answer is Detokenized or Refused."""

    model: ShortText = ""  # as in Tokenize
    tokens: Annotated[list[TokenId], Meta(max_length=1_000_000)]


class Detokenized(Struct, frozen=True, kw_only=True, tag="detokenized"):
    text: str


class Verdict(Struct, frozen=True, kw_only=True):
    """The end of a request, exactly one. Times in seconds; `slo_met` by the SLO's definition."""

    finish_reason: FinishReason
    slo_met: bool
    relegated: bool  # the request was best-effort at some time
    service_class: ServiceClass  # at the end
    prompt_tokens: Count
    output_tokens: Count
    attempts: Count
    ttft_s: float | None
    worst_tbt_s: float | None
    mean_tpot_s: float | None
    ttlt_s: float | None
    ended_unix_s: float
    replica: ReplicaId | None = None
    message: str = ""
    retry_after_s: float | None = None
    # how many output tokens were thinking; counted only if the SLO names a pace for thinking
    thinking_tokens: Count = 0
    cached_tokens: Count = 0  # of the prompt, found in a prefix cache
    thinking_tpot_s: float | None = None  # mean time per thinking token after the first
    missed: Missed = Missed.NOTHING  # the bound that was broken, where `slo_met` is false
    # None: each was kept, or nobody kept account (a simulated request)
    first_missed: FirstMissed | None = None
    task_left_s: float | None = None  # of its task's time when it ended; below 0: the task is late


class Likelihood(Struct, frozen=True, array_like=True):
    """A token and its natural log-probability, before temperature and cuts. `piece`: its bytes."""

    token: Count
    piece: bytes
    logprob: float


class TokenLogprob(Struct, frozen=True, array_like=True):
    """The log-probability of one output token, and of the likeliest in its place (`top`)."""

    chosen: Likelihood
    top: list[Likelihood] = []


class Replay(Struct, frozen=True, kw_only=True, tag="replay"):
    """The answer to Attach: tokens from `offset` on, the text, and the verdict of an ended one."""

    stream_subject: str
    offset: Count
    tokens: list[TokenId]
    text: str
    text_offset: Count
    verdict: Verdict | None = None
    logprobs: list[TokenLogprob] = []  # parallel to `tokens`, or empty


class TaskRound(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The round of a task that a request is. The TTLT in its record is for planners: the time that
    the task leaves to this round.
    """

    number: FromOne
    due_unix_s: Finite  # of the task's last token
    ttlt_s: float | None = None  # that the caller asked for, for this request alone


class Explain(Struct, frozen=True, kw_only=True):
    """The question where the time of a request went. The answer is Explanation or Refused."""

    tenant: str = ""  # that of the subject; empty: taken from there
    request_id: str


class Share(Struct, frozen=True, kw_only=True):
    """The part of a time that went into one cause."""

    cause: Cause
    seconds: float
    share: float  # of that time, from 0 to 1


class Explanation(Struct, frozen=True, kw_only=True, tag="explanation"):
    """The story of a request until `until_unix_s`. To a tenant, others are without names."""

    request_id: str
    tenant: str
    tier: str
    answer: str  # one sentence: was it late, and why
    state: str  # waiting, placed, relegated, ended
    slo: Slo
    service_class: ServiceClass
    relegated: bool  # it was best-effort at some time
    arrived_unix_s: float
    until_unix_s: float
    attempt: Count
    replica: ReplicaId | None
    prompt_tokens: Count
    output_tokens: Count
    ttft_s: float | None
    worst_tbt_s: float | None
    ttlt_s: float | None  # to the newest token
    trace_id: str  # empty: there is no trace
    first_missed: FirstMissed | None
    shares: list[Share]  # of its whole life, the largest first
    # of the time until the token came (or now) whose deadline was the first one missed
    shares_until_missed: list[Share]
    neighbours: list[Neighbour]  # whose prefills ran in the time of those shares
    happenings: list[Happening]
    left_out: Count  # happenings, from the middle
    verdict: Verdict | None
    model: str = ""  # empty: any
    task: TaskRound | None = None


class FindEnded(Struct, frozen=True, kw_only=True):
    """The question which ended requests belong to a trace, or came in a minute. The answer is
    FoundEnded or Refused.
    """

    tenant: str = ""  # that of the subject; empty: taken from there, or all for the operator
    trace_id: str = ""  # as trace backends write it
    minute_unix_s: Finite | None = None  # any instant of that minute, if there is no trace


class EndedRow(Struct, frozen=True, kw_only=True):
    """One ended request, in short; Explain with its tenant and id has the rest."""

    tenant: str
    request_id: str
    tier: str
    arrived_unix_s: float
    finish_reason: FinishReason
    slo_met: bool
    first_missed: FirstMissed | None


class FoundEnded(Struct, frozen=True, kw_only=True, tag="found"):
    """The requests that were found, those that were latest first."""

    rows: list[EndedRow]
    left_out: Count


class Delta(Struct, frozen=True, kw_only=True, tag="delta"):
    """New tokens, behind `offset` tokens and `text_offset` characters. A reader drops what it has,
    and attaches at a gap.
    """

    attempt: Count
    offset: Count
    tokens: list[TokenId]
    text: str
    text_offset: Count
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] = []  # parallel to `tokens`, or empty


class Status(Struct, frozen=True, kw_only=True, tag="status"):
    """A step of a request: accepted, relegated, promoted, or replaced (to another replica)."""

    state: str
    service_class: ServiceClass
    attempt: Count
    replica: ReplicaId | None = None
    reason: str = ""


class End(Struct, frozen=True, kw_only=True, tag="end"):
    """The last event of a request. `verdict.output_tokens` tells whether all tokens are there."""

    verdict: Verdict


StreamEvent = Delta | Status | End

# ---------------------------------------------------------------- durable records (KV `requests`)


class Body(Struct, frozen=True, kw_only=True):
    """The heavy, unchanging part of a request, stored once under its own key."""

    prompt: bytes  # token ids, int32
    sampling: Sampling
    adapter: str = ""


class Resume(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The output of earlier attempts, which the client may have; the next one continues it."""

    tokens: bytes = b""  # int32
    text: str = ""
    measure: Measure = Measure()
    logprobs: list[TokenLogprob] = []  # parallel to `tokens`, or empty
    cached_tokens: Count = 0  # of the prompt, found in a prefix cache when it was first computed
    diary: RequestTimeline = RequestTimeline()

    @property
    def begun(self) -> bool:
        """True if something of the prompt was computed."""
        return len(self.tokens) > 0 or self.diary.account.prefill_s > 0.0


class KvAt(Struct, frozen=True, kw_only=True):
    """KV of a request that another replica may fetch: of its first `tokens` positions, as `replica`
    had them when it gave the request up. What has given way there since is computed again.
    """

    replica: ReplicaId
    address: Annotated[str, Meta(max_length=256)]  # host:port, of its worker
    tokens: Count


class TaskSoFar(Struct, frozen=True, kw_only=True):
    """A task as far as it has come: a session whose requests have a deadline together."""

    began_unix_s: Finite  # when its first round arrived
    rounds: FromOne  # that have begun
    newest: RequestKey  # the request that began the newest round
    newest_unix_s: Finite  # when that one arrived


class Record(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The only truth about where a request is. It changes only by compare-and-set, as
    shared/core/record/record.py says, and has a verdict once the request has ended.
    """

    key: RequestKey
    body_key: str
    owner: str  # the admission or relegation instance that placed it last, or is to place it
    state: RecordState
    attempt: Count
    service_class: ServiceClass
    tier: str
    slo: Slo
    importance: Importance
    application: str
    session: str
    arrived_unix_s: float
    expires_unix_s: float
    prompt_tokens: Count
    max_tokens: Count
    stream_subject: str
    json: bool = False  # the client speaks JSON
    allow_relegation: bool = True
    replica: ReplicaId | None = None
    incarnation: str = ""
    resume: Resume = Resume()
    relegated: bool = False  # the request was best-effort at some time
    left: str = ""  # why its last replica gave it up
    # number of attempts whose replica was lost; limited, since a request may break engines
    lost: Count = 0
    engines_died: Count = 0  # number of attempts in whose midst the engine died or hung
    cancelled: bool = False  # the tombstone of a cancel
    traceparent: str = ""  # of the request's span `request`
    caller: str = ""  # the traceparent that its client sent: the parent of that span
    verdict: Verdict | None = None
    output_key: str = ""  # the key of its output, once it has ended
    needs: tuple[str, ...] = ()  # features its replica must have, sorted (shared/features.py)
    asked: bytes = b""  # the digest of what the client asked for (intake/idempotency.py)
    weight: Weight = 1.0  # of its tenant, beside tenants whose requests are equally important
    # the instant until which a best-effort request waits for its first token, by its tier
    begin_by_unix_s: float = math.inf
    body: bytes = b""  # its body, sealed, where that is small; until it ends
    ended_by: str = ""  # drawn anew for each try to end it: one of these wrote the end
    thinking: Thinking | None = None  # the marks in its answer, for a client that attaches
    model: ShortText = ""  # only replicas of this model take it; empty: any
    prefix: bytes = b""  # of its prompt (shared/prefix.py)
    salt: str = ""  # whose prompts share KV with its own: those of one tenant, or of all that share
    task: TaskRound | None = None  # None: its SLO has no deadline of a task
    # the replica where it is to go on once its prompt is computed; None: where it is
    then: ReplicaId | None = None
    kv: KvAt | None = None  # what its last replica had computed; None: it cannot be fetched

    @property
    def judged_slo(self) -> Slo:
        """The SLO that the verdict is by: a round of a task may last until the task is due."""
        if self.task is None:
            return self.slo
        left_s = self.task.due_unix_s - self.arrived_unix_s
        own_s = math.inf if self.task.ttlt_s is None else self.task.ttlt_s
        return replace(self.slo, ttlt_s=max(min(left_s, own_s), SHORTEST_S))

    @property
    def work_tokens(self) -> int:
        """The most tokens that it may cost: those of its prompt and of its longest output."""
        return self.prompt_tokens + self.max_tokens

    @property
    def leaves_pool_unix_s(self) -> float:
        """The instant until which the request waits in the pool."""
        if self.resume.measure.tokens:
            return self.expires_unix_s
        return min(self.expires_unix_s, self.begin_by_unix_s)


# ---------------------------------------------------------------- admission <-> planner


class Offer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The question to a planner whether its replica can hold the request's SLO. It has everything
    that a policy may know about a request, and not the prompt.
    """

    key: RequestKey
    attempt: Count
    service_class: ServiceClass
    tier: str
    slo: Slo
    importance: Importance
    application: str
    arrived_unix_s: Finite
    prompt_tokens: Count
    max_tokens: Count
    generated_tokens: Count = 0  # made by earlier attempts; their KV is computed again
    next_due_unix_s: float = math.inf  # deadline of the next token
    expires_unix_s: float = math.inf
    begin_by_unix_s: float = math.inf  # a best-effort request without a token is given up then
    session: str = ""
    allow_relegation: bool = True
    first_token_unix_s: float = math.inf  # when its first token was emitted; inf: not yet
    newest_token_unix_s: float = math.inf  # when its newest token was emitted; inf: it has none
    # why its last replica gave it up ("offloaded", "drained", ...); empty: it has had none
    left: str = ""
    # the SLO names a pace for thinking, and the thinking has ended: `tbt_s` is the pace now
    answering: bool = False
    body_key: str = ""  # for the worker that is to hold it
    needs: tuple[str, ...] = ()  # features its replica must have
    model: str = ""  # of its replica; empty: any
    weight: Weight = 1.0  # of its tenant
    hops_left: Count = 0  # replicas that may be asked if this one declines
    prefix: bytes = b""  # of its prompt (shared/prefix.py)
    cached_tokens: Count = 0  # that its replica is expected to have; set by the planner
    load_s: float = 0.0  # for those of them that come back from the host's memory; set likewise
    then: ReplicaId | None = None  # as in Record
    kv_at: ReplicaId | None = None  # the replica from which its KV may be fetched
    kv_tokens: Count = 0  # positions of that; once it is held here, those that have come

    @property
    def thinking(self) -> bool:
        """True while the next token belongs to the thinking stage, as far as is known."""
        return self.slo.thinks and not self.answering


class OfferAccepted(Struct, frozen=True, kw_only=True, tag="accepted"):
    """The worker holds the request, prompt included. To a hold: `kv_tokens` of its first positions
    have come from another replica.
    """

    reason: str = ""
    kv_tokens: Count = 0


class OfferDeclined(Struct, frozen=True, kw_only=True, tag="declined"):
    """The replica certainly does not hold it; `earliest_s` from now it could meet the SLO."""

    reason: str = ""
    earliest_s: float | None = None
    loads: tuple[Neighbour, ...] = ()  # requests whose prefills it has to compute first


class OfferNotReady(Struct, frozen=True, kw_only=True, tag="not_ready"):
    """Nobody decided: the replica has no planner or worker just now, or they resync. Ask again."""

    reason: str = ""


class OfferInDoubt(Struct, frozen=True, kw_only=True, tag="in_doubt"):
    """The worker may hold it: withdraw the attempt before the request goes elsewhere."""

    reason: str = ""


CertainAnswer = OfferAccepted | OfferDeclined | OfferNotReady
OfferAnswer = CertainAnswer | OfferInDoubt


class Digest(Struct, frozen=True, kw_only=True):
    """The state of a replica for routers, from its planner, every 100 ms."""

    replica: ReplicaId
    incarnation: str
    planner: str
    at_unix_s: Finite
    model: str
    pool: str
    waiting: Count  # standard requests still in prefill
    running: Count  # standard decodes
    best_effort: Count
    waiting_prefill_tokens: Count  # standard, not yet computed
    backlog_s: Lasted  # predicted seconds until the standard prefills queued now are done
    kv_blocks: Count
    kv_free_blocks: Count  # free once everything held has been computed
    free_slots: Count
    surplus: bool  # True: the replica can take best-effort work now
    block_tokens: FromOne = 16  # of one KV block
    # predicted seconds that one token of a prefill takes beside the present decodes
    token_s: Annotated[float, Meta(ge=1e-9, le=1e6)] = 1e-4
    accepting: bool = True
    context_tokens: Count = 0  # of prompt and answer; 0: not told
    features: list[str] = []  # those of its engine (shared/features.py)
    adapters: list[str] = []
    tiers: list[str] = []  # of its standard requests; empty: all
    # hashes of prefixes (shared/prefix.py) that it keeps and dropped since the digest before, and
    # the number of digests that told any
    prefix_seq: Count = 0
    prefixes_kept: bytes = b""
    prefixes_dropped: bytes = b""
    cached_tokens: Count = 0  # of the prompt that is to be placed; set by the router
    role: Role = Role.BOTH
    decode_s: Lasted = 0.0  # predicted seconds of an iteration of its decodes, with one more
    kv_address: Annotated[str, Meta(max_length=256)] = ""  # as in Announce
    kv_move_s: Lasted = 0.0  # as in Announce
    # seconds for the KV of the request that is to be placed to go on from there; set by the router
    hand_over_s: Lasted = 0.0


class AskPrefixes(Struct, frozen=True, kw_only=True):
    """The question to a planner for all prefixes that its replica keeps."""


class Prefixes(Struct, frozen=True, kw_only=True):
    """The answer: the newest of them, as they stand after the digest of this number."""

    seq: Count
    kept: bytes = b""


# ---------------------------------------------------------------- relegation -> admission


class PoolLane(Struct, frozen=True, kw_only=True):
    """The requests of one tenant in the pool that are equally important."""

    tenant: str
    importance: Importance
    weight: Weight  # of the tenant
    requests: Count
    tokens: Count  # work: prompt and longest output of each
    model: str = ""  # that they are for; empty: any


class PoolDigest(Struct, frozen=True, kw_only=True):
    """The state of the best-effort pool, published by the relegation instance that leads."""

    # work that the fleet takes out of the pool, while requests wait
    tokens_s: Annotated[float, Meta(ge=0, le=1e12)]
    lanes: list[PoolLane]  # those with most work; POOL_LANES at most
    # the part of `tokens_s` that replicas of each model take, where there are several models
    rates: dict[str, Annotated[float, Meta(ge=0, le=1e12)]] = {}


# ---------------------------------------------------------------- scaling


class TierArrivals(Struct, frozen=True, array_like=True):
    """The requests of one tier that one admission took in since its last message. Sums over them;
    a bound that a request does not have adds nothing.
    """

    tier: ShortText
    requests: Count
    prompt_tokens: Count
    prompt_squares: Sum  # the sum of the squares of their prompt tokens
    due_s: Sum  # the seconds within which each prompt is due, or each answer without a TTFT
    paces: Sum  # tokens a second that their paces ask for
    whole: Count  # of the requests: whole answers, which owe nothing before their last token
    spare_s: Sum  # their TTFTs, where tokens that come early earn slack


class WorkArrived(Struct, frozen=True, kw_only=True):
    """Admission -> relegation: the work that came of late. A lost message counts as no work."""

    model: str
    tiers: list[TierArrivals]


class TierNeed(Struct, frozen=True, array_like=True):
    """The replicas that this tier asks for, beside all tiers that are due sooner."""

    tier: str
    replicas: Count


class ReplicasNeeded(Struct, frozen=True, kw_only=True):
    """The replicas of one model that hold the SLOs of its load now and `ahead_s` later, from the
    relegation instance that leads. `tier` asks for most.
    """

    model: str
    at_unix_s: Finite
    replicas: Count
    tier: str
    why: str
    tiers: list[TierNeed]
    serving: Count
    ahead_s: Lasted
    # of the replicas whose role is `auto`, those that compute prompts only
    prefill: tuple[ReplicaId, ...] = ()


# ---------------------------------------------------------------- planner <-> worker


class EngineTime(Struct, frozen=True, kw_only=True):
    """The seconds in which an engine held work, since its worker began: computing, waiting for a
    plan, or late. `late_s`: hand-overs and sleeps that were too long, less what was caught up.
    """

    exec_s: float = 0.0
    idle_s: float = 0.0
    late_s: float = 0.0
    predicted_s: float = 0.0  # for `exec_s` and `late_s`, by the plans


class DraftYield(Struct, frozen=True, kw_only=True):
    """The drafts of one application that an engine accepted of late."""

    application: str
    verifications: Annotated[float, Meta(ge=0, le=1e9)]
    # by position behind the root: the share accepted where all before were
    accepted: Annotated[list[Annotated[float, Meta(ge=0, le=1)]], Meta(max_length=64)]


class Announce(Struct, frozen=True, kw_only=True):
    """A worker's heartbeat and its engine's facts."""

    replica: ReplicaId
    incarnation: str
    at_unix_s: Finite
    model: str
    engine: str
    profile: str  # name of a shipped profile, or that of `fitted`
    pool: str
    kv_blocks: Count
    block_tokens: FromOne
    context_tokens: Count
    max_slots: SlotCount
    epoch: Number  # the highest that the worker has seen
    # number of the newest ack it has stored; a planner without that ack has missed one
    ack_seq: Number = 0
    # the worker takes no new requests: it is about to stop, or the store does not take its acks
    draining: bool = False
    # it leaves: at this instant it gives up what its planner has not moved by then
    leaves_unix_s: Finite | None = None
    # the profile itself where it is not a shipped one: measured by the worker on its engine, or the
    # operator's own; shared/core/announced.py checks it
    fitted: ProfileFile | None = None
    # sim: wall-clock seconds per second of the profile
    pace: Annotated[float, Meta(gt=0)] = 1.0
    # cost of its draft model, in fractions of the profile; 0: it has none
    draft: DraftCost = 0.0
    # blocks of its draft model's own KV; 0: there is none, or it is wherever the target's is
    draft_kv_blocks: Count = 0
    # the most drafts of a chain, if its engine verifies chains but no trees; 0: it verifies trees
    longest_chain: Count = 0
    # blocks of KV in the host's memory, and the seconds that a token takes from there to the GPU
    host_kv_blocks: Count = 0
    kv_load_s: Annotated[float, Meta(ge=0, le=1)] = 0.0
    draft_yields: list[DraftYield] = []  # learned since it began, by application
    features: list[str] = []  # what not every engine can do (shared/features.py)
    adapters: list[str] = []  # LoRA adapters it has loaded
    # of its model, as the worker sees it: an admission may read the tokenizer there
    # (services/admission/tokenizers.py)
    folder: Annotated[str, Meta(max_length=4096)] = ""
    vocabulary: Count = 0  # number of its model's token ids; 0: not told
    time: EngineTime = EngineTime()
    tiers: list[str] = []  # of the standard requests that it serves; empty: all
    role: Role = Role.BOTH
    # host:port where other workers fetch KV; empty: it stays where it is
    kv_address: Annotated[str, Meta(max_length=256)] = ""
    # seconds that a token's KV takes to come here from another replica; 0: none can come
    kv_move_s: Annotated[float, Meta(ge=0, le=1)] = 0.0


class Hold(Struct, frozen=True, kw_only=True):
    """A planner asks its worker to take this attempt in; record and body are in the store."""

    epoch: Number
    sync: Number
    slot: Count
    key: RequestKey
    attempt: Count
    # lets the worker read record and body at once; the record decides whether it is the right body
    body_key: str = ""
    keep_s: Lasted = 0.0  # that its KV stays longer than others once it has ended
    # the longest that the worker waits for KV from where the record says; 0: it computes it again
    fetch_s: Lasted = 0.0


# No answer in time counts as in doubt: only a resync tells what the worker holds.
HoldAnswer = OfferAccepted | OfferDeclined | OfferInDoubt


class Selection(Struct, frozen=True, kw_only=True):
    """The speculation of one plan: the worker drafts, then a pure function of the policy selects.
    Columns run along the entries; a `cap` counts verified tokens, the root included.
    """

    # "chain" (first cap-1 drafts) or the name of a tree selection (shared/policy/speculation.py)
    method: str
    depth: bytes  # int32: draft steps of each entry; 0: the entry does not speculate
    width: bytes  # int32: beam width of each entry
    budget_tokens: Count  # tokens that all entries verify together
    # most tokens that one entry verifies for its own need (AdaServe n_max)
    needed_limit_tokens: Count = 1 << 30
    # How long the iteration is to last. The worker computes each need from it (AdaServe A(r), the
    # tokens that keep the pace) and from the tokens that it has; 0: no entry has a need.
    lasts_s: Lasted = 0.0


class BatchPlan(Struct, frozen=True, kw_only=True):
    """The plan of one iteration. Entries are caps, in order; `seq` has no holes within an epoch.
    Releases, preemptions and class changes take effect first.
    """

    replica: ReplicaId
    incarnation: str
    epoch: Number
    sync: Number
    seq: Number
    slots: bytes
    caps: bytes
    predicted_s: Lasted
    # the part of `predicted_s` that its decodes would take alone, where it has prefills
    decodes_s: Lasted = 0.0
    drafts_s: Lasted = 0.0  # the part of `predicted_s` that drafting takes
    released: bytes = b""  # slots whose attempt ends here, for the reasons in `released_why`
    released_why: list[str] = field(default_factory=list)
    preempted: bytes = b""  # slots whose KV is dropped and whose tokens are kept
    relegated: bytes = b""  # slots that become best-effort
    promoted: bytes = b""  # slots that become standard again
    selection: Selection | None = None


class PlanRefused(Struct, frozen=True, kw_only=True):
    """The worker cannot run the plan: a stale epoch, a hole in seq, or another incarnation."""

    incarnation: str
    epoch: Number
    expected_seq: Number
    reason: str


class Held(Struct, frozen=True, kw_only=True):
    """A slot was given to an attempt; in the log with the next ack. `offset`: tokens before."""

    slot: Count
    key: RequestKey
    attempt: Count
    offset: Count = 0  # tokens made by earlier attempts
    text_offset: Count = 0
    tier: str = ""
    at_unix_s: Finite = 0.0
    best_effort: bool = False


class PlanAck(Struct, frozen=True, kw_only=True, tag="ack"):
    """The outcome of an iteration: an entry of the ack log, then the message to the planner.
    `slots`, `computed` (KV positions) and `emitted` (tokens) are parallel; `tokens` and `texts`
    follow `emitted`. plan_seq 0: ends between iterations. `ack_seq`: an incarnation's acks from 1,
    without holes.
    """

    replica: ReplicaId
    incarnation: str
    epoch: Number
    plan_seq: Number
    ack_seq: Number
    slots: bytes = b""
    computed: bytes = b""
    emitted: bytes = b""
    tokens: bytes = b""
    # one text for each slot with emitted > 0 or that ended here
    texts: list[str] = field(default_factory=list)
    # one for each token of `logprob_slots`, in the order of `tokens`
    logprobs: list[TokenLogprob] = []
    logprob_slots: bytes = b""  # slots whose request asked for log-probabilities
    # (slot, FinishReason or the reason of its release)
    ended: list[tuple[Count, str]] = field(default_factory=list)
    # slots given since the last ack, before the entries ran
    held: list[Held] = field(default_factory=list)
    preempted: bytes = b""
    relegated: bytes = b""
    promoted: bytes = b""
    skipped: bytes = b""  # slots planned, whose attempt had ended already
    drafted: bytes = b""  # parallel to slots: draft tokens verified
    cached: bytes = b""  # parallel to slots: positions of `computed` found in a prefix cache
    answering: bytes = b""  # slots whose thinking ended in this iteration
    # parallel to `answering`: how many of all output tokens were thinking; 0: it never thought
    thinking_tokens: bytes = b""
    free_blocks: Count = 0
    # KV blocks saved because requests share them, before those that ended left
    shared_blocks: Count = 0
    draft_shared_blocks: Count = 0  # the same in the draft model's own KV
    started_unix_s: Finite = 0.0
    ended_unix_s: Finite = 0.0
    exec_s: Lasted = 0.0  # duration by the worker's monotonic clock
    outside_s: Finite = 0.0  # part of exec_s outside the model and its sampling; 0: unknown
    drafted_s: Lasted = 0.0  # part of exec_s in which the draft model worked; 0: unknown
    loaded_s: Lasted = 0.0  # part of exec_s for KV that came back from the host's memory
    idle_s: Lasted = 0.0  # wait for this plan after the previous iteration, while holding work
    late_s: Finite = 0.0  # the rest of the time since then: hand-overs, and what ran between them
    # the parts of exec_s for decodes, as the plan predicted their share, and for drafting, as
    # measured or else predicted; the rest was for prefills, if there were any
    decodes_s: Lasted = 0.0
    drafts_s: Lasted = 0.0
    late: bytes = b""  # slots whose first late token came in this iteration
    # hashes of prefixes (shared/prefix.py) that are now on the GPU, in the host's memory, and gone
    kept: bytes = b""
    moved: bytes = b""
    dropped: bytes = b""


class AttemptOver(Struct, frozen=True, kw_only=True):
    """An attempt left its replica; repeated until settled. `why`: a FinishReason, or `relegated`,
    `offloaded`, `drained`, `handed over`, `engine died`: then it goes on from `resume`.
    """

    key: RequestKey
    attempt: Count
    replica: ReplicaId
    incarnation: str
    why: str
    relegated: bool  # the request was best-effort at some time
    service_class: ServiceClass
    resume: Resume
    message: str = ""
    kv: KvAt | None = None  # as in Record

    def __post_init__(self) -> None:
        resume = self.resume
        if len(resume.tokens) != 4 * resume.measure.tokens:
            raise ValueError("the output must be as long as its measure says")
        if len(resume.logprobs) not in (0, resume.measure.tokens):
            raise ValueError("each token of the output must have a log-probability, or none")


class SnapshotEntry(Struct, frozen=True, kw_only=True):
    held: Held
    tokens: bytes
    text: str
    measure: Measure
    service_class: ServiceClass
    relegated: bool = False  # the request was best-effort at some time
    logprobs: list[TokenLogprob] = []  # parallel to `tokens`, or empty
    cached_tokens: Count | None = None  # as in Resume; None: nothing of its prompt was computed
    diary: RequestTimeline = RequestTimeline()


class Snapshot(Struct, frozen=True, kw_only=True, tag="snapshot"):
    """The log's content about attempts held or not settled; the log may be trimmed up to here."""

    incarnation: str
    entries: list[SnapshotEntry]
    overs: list[AttemptOver]


class Registered(Struct, frozen=True, kw_only=True, tag="registered"):
    """A worker began under a new incarnation, and has nothing of what the log held before."""

    incarnation: str


class Fenced(Struct, frozen=True, kw_only=True, tag="fenced"):
    """Admission `by` declared this incarnation lost: the next append of the worker must fail."""

    incarnation: str
    by: str


LogEntry = PlanAck | Snapshot | Registered | Fenced


class Resync(Struct, frozen=True, kw_only=True):
    """A planner asks for the worker's state, page by page. The worker drops the plans that it has
    not begun, and obeys `epoch` from now on. `sync` numbers a lease's resyncs: plans and holds sent
    before the newest are refused.
    """

    epoch: Number
    sync: Number
    page: Count = 0


class ResyncEntry(Struct, frozen=True, kw_only=True):
    """A request as the worker has it; `computed_tokens` positions have their KV."""

    slot: Count
    offer: Offer  # the request as of now
    computed_tokens: Count
    generated_tokens: Count
    draft_tokens: Count = 0  # positions filled in the draft model's KV


class ResyncPage(Struct, frozen=True, kw_only=True):
    announce: Announce
    next_seq: Number
    ack_seq: Number  # of the newest ack that the entries include
    entries: list[ResyncEntry]
    more: bool
    shared_blocks: Count = 0  # KV blocks that the entries save because they share them
    draft_shared_blocks: Count = 0  # the same in the draft model's own KV
    kept: bytes = b""  # hashes of the prefixes that the engine keeps on its GPU
    moved: bytes = b""  # and of those in the host's memory


# ---------------------------------------------------------------- worker <-> admission


class Settled(Struct, frozen=True, kw_only=True):
    """The record has the end of the attempt; the worker may forget it."""


class Withdraw(Struct, frozen=True, kw_only=True):
    """The worker must release this attempt, and refuse it if it is offered later. Another
    incarnation than that of the record's place cannot know what became of it, and refuses.
    """

    key: RequestKey
    attempt: Count
    incarnation: str


class Withdrawn(Struct, frozen=True, kw_only=True):
    """The attempt's end, with its output; nothing more is logged. None if it was never here."""

    over: AttemptOver | None


class Fetch(Struct, frozen=True, kw_only=True):
    """The prompt of this request is being computed: the worker of `Record.then` may fetch its KV
    from where the record says while that goes on.
    """

    key: RequestKey


class Present(Struct, frozen=True, kw_only=True):
    """The question to a process whether it is connected, and its answer."""


class Holdings(Struct, frozen=True, kw_only=True):
    """The question which of these (key, attempt) the worker knows: held, or not yet settled."""

    asked: list[tuple[RequestKey, Count]]


class HoldingsAnswer(Struct, frozen=True, kw_only=True):
    incarnation: str
    known: list[bool]


class Cancel(Struct, frozen=True, kw_only=True):
    """The client does not want the rest of the output."""

    reason: str = "cancelled by the client"


class Hint(Struct, frozen=True, kw_only=True):
    """A record was relegated: relegation reads it at once, or with its next listing."""

    key: RequestKey


class LeaseValue(Struct, frozen=True, kw_only=True):
    holder: str


class TimeAsked(Struct, frozen=True, kw_only=True):
    """A process asks what time the fleet has. The answer is TimeTold."""


class TimeTold(Struct, frozen=True, kw_only=True):
    """The fleet's time as one process has it, and how far its host's clock is ahead of this."""

    service: ShortText
    instance: ShortText
    unix_s: Finite
    host_ahead_s: Finite


# ---------------------------------------------------------------- services -> console


class Ended(Struct, frozen=True, kw_only=True):
    """A request of this tier ended, or some were refused at the door for want of room: then there
    is no key and no verdict. Sent for the console and the like; nothing depends on it.
    """

    tier: ShortText
    key: RequestKey | None = None
    slo: Slo | None = None
    arrived_unix_s: float = 0.0
    verdict: Verdict | None = None
    requests: Count = 1  # more than one only if they were refused
    model: str = ""  # empty: not known


class Roster(Struct, frozen=True, kw_only=True):
    """The question to a planner which requests its replica holds, in these slots."""

    slots: bytes = b""  # int32; empty: all

    def __post_init__(self) -> None:
        if len(self.slots) % 4:
            raise ValueError("slots must be a column of int32")


class RosterEntry(Struct, frozen=True, kw_only=True):
    """One request, as predicted after the plans in flight."""

    slot: Count
    key: RequestKey
    attempt: Count
    service_class: ServiceClass
    tier: str
    slo: Slo
    arrived_unix_s: float
    prompt_tokens: Count
    max_tokens: Count
    computed_tokens: Count
    generated_tokens: Count
    next_due_unix_s: float  # deadline of the next token; inf: it has none
    thinking: bool = False


class RosterAnswer(Struct, frozen=True, kw_only=True):
    entries: list[RosterEntry]
