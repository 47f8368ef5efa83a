"""The interface between a replica's core (shared/core/replica/replica.py) and a policy.

The core shows a policy the *predicted view*: the replica as it will be when the plans already in
flight are done. The policy answers with choices. It holds learned statistics only. Its decisions
about a request (class, phase) are written in the table and come back in the next view, so any
planner can go on from any point. docs/write-a-policy.md has a worked example; which replica a
request is offered to is decided elsewhere (shared/routing).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.columns import EMPTY, NOWHERE, Indices, Ints
from shared.perf.draft import Draft
from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.schemas import Offer
from shared.vocabulary import MOST_DRAFTS, Definition

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


DEFINITIONS = tuple(Definition)


class Phase(IntEnum):
    """The phase of a request. WAITING: nothing computed. PREFILL: some of target_tokens computed.
    DECODE: an output token per computed token.
    """

    WAITING = 0
    PREFILL = 1
    DECODE = 2


_DECODE = int(Phase.DECODE)  # an int, since numpy compares enums slowly


@dataclass(slots=True, eq=False)
class Rows:
    """The columns of a replica's requests: arrays in parallel, one row per request.

    Each column is declared here and nowhere else. Its annotation is its dtype; the
    request table (shared/core/replica/request_table.py) allocates, clears and moves it, and a view
    shows it.
    """

    slot: Indices
    phase: Ints
    prompt_tokens: Ints
    # to compute before the next output token: prompt, plus what was generated before a preemption
    target_tokens: Ints
    computed_tokens: Ints  # KV positions filled
    load_s: Floats  # for those of them that come back from the host's memory when it begins
    generated_tokens: Ints  # output so far, all attempts
    unsure_tokens: Ints  # more that speculating plans in flight may yield
    # positions filled in the draft model's KV; the draft computes the others before it next drafts
    draft_tokens: Ints
    max_tokens: Ints
    kv_held_blocks: Ints
    application: Ints  # index into `View.applications`
    arrived_unix_s: Floats
    first_token_unix_s: Floats  # when token 1 came (predicted, while in flight); inf before
    newest_token_unix_s: Floats  # when its newest token came, in the same way
    first_due_unix_s: Floats  # arrived + TTFT; inf without one
    next_due_unix_s: Floats  # deadline of the next owed token; inf without one
    last_due_unix_s: Floats  # arrived + TTLT; inf without one
    tbt_s: Floats  # pace of the present stage (thinking, then response); inf without one
    tightest_tbt_s: Floats  # of the present stage and those to come; inf without one
    # its SLO names a pace for thinking, and the worker has not reported that thinking is over
    thinking: Bools
    definition: Ints  # index into DEFINITIONS: the definition of its SLO
    importance: Floats
    best_effort: Bools
    offloaded: Bools  # another replica gave it up, so that it is served sooner here


@dataclass(slots=True, eq=False, kw_only=True)
class View(Rows):
    """The replica when the next plan starts. Row order is arbitrary but reproducible.

    Read-only: policies write neither into the arrays nor into the view. A speculating plan in
    flight yields one token or more: columns count the one (`computed_tokens`, `generated_tokens`,
    `next_due_unix_s`), and `unsure_tokens` is how many more there can be.
    """

    start_unix_s: float  # when the next iteration is predicted to begin
    profile: Profile
    kv_blocks: int  # capacity
    kv_free_blocks: int  # after everything in flight
    block_tokens: int
    context_tokens: int
    applications: Sequence[str]
    # accepted and on the way to the worker: not rows yet, but already promised
    promised: Sequence[Offer] = ()
    draft: Draft | None = None  # the cost of the draft model; None: no speculation
    # By position in a chain, the share of drafts accepted if all before were, as the worker had
    # seen when this planner took the replica over; empty: it had seen none. A policy that has
    # learned nothing yet begins with these shares.
    accepted_shares: Sequence[float] = ()
    # The most drafts of a chain that the engine verifies, if it verifies no trees (vLLM); 0: it
    # verifies trees.
    longest_chain: int = 0
    pool: str = ""  # of the replica, as its worker announced it
    # columns that follow from others
    standard: Bools = field(init=False)
    has_ttlt: Bools = field(init=False)
    whole: Bools = field(init=False)  # nothing is due before its last token
    in_decode: Bools = field(init=False)
    top_tokens: Ints = field(init=False)  # KV positions filled, and those that may be

    def __post_init__(self) -> None:
        self.standard = ~self.best_effort
        self.has_ttlt = np.isfinite(self.last_due_unix_s)
        self.whole = self.has_ttlt & (self.next_due_unix_s == math.inf)
        self.in_decode = self.phase == _DECODE
        self.top_tokens = self.computed_tokens + self.unsure_tokens

    @property
    def rows(self) -> int:
        return len(self.slot)

    @property
    def deepest(self) -> int:
        """The most drafts in line that the engine verifies for a request."""
        return self.longest_chain or MOST_DRAFTS


@dataclass(frozen=True, slots=True)
class Speculation:
    """The speculation of the decodes of one choice. Columns run along its entries; an entry with
    depth 0 does not speculate.

    An entry's cap bounds its verified tokens, the root included, and is what KV is reserved for; it
    keeps at most depth + 1 of them. Which ones are verified is chosen on the worker, from the
    draft's probabilities (shared/policy/speculation.py).
    """

    method: str  # a name in shared/policy/speculation.py
    depth: Ints  # draft steps, at most MOST_DRAFTS
    width: Ints  # beam width of each step, at most MOST_DRAFTS
    budget_tokens: int  # verified by all speculating entries together, roots included
    needed_limit_tokens: int = 1  # the most that one entry may verify for its own need
    # How long the iteration is to last. The worker computes each need from it, and from the tokens
    # that the request then has (shared/policy/need.py); 0: no entry has a need.
    lasts_s: float = 0.0

    def along(self, kept: Bools) -> "Speculation":
        """The speculation of some of the entries."""
        return replace(self, depth=self.depth[kept], width=self.width[kept])


@dataclass(frozen=True, slots=True)
class Choice:
    """One iteration. Entries in the order in which they claim KV: if blocks run short, the core
    cuts from the end.

    slots, caps: parallel. The cap of a decode is 1 (or, speculating, its verified tokens);
    the cap of a prefill is its chunk. The core drops entries whose request has left by the time
    they would run. No entries at all means: nothing to run until something happens, or until
    `again_unix_s`. Class changes and releases take effect before the entries; a relegated or
    promoted slot may still be an entry, a released one may not. A relegated slot that has not begun
    leaves the replica for the relegation service; the core sees to that. `repeats`: the same
    entries stay right for so many iterations in a row, this one included, while nothing but
    progress happens and KV is not scarce. The core then does not ask again, live and simulated
    alike.
    """

    slots: Indices = field(default_factory=lambda: NOWHERE)
    caps: Ints = field(default_factory=lambda: EMPTY)
    preempt: Sequence[int] = ()  # slots that lose their KV, keep their tokens, and prefill again
    relegate: Sequence[int] = ()
    promote: Sequence[int] = ()
    release: Sequence[tuple[int, str]] = ()  # (slot, "offloaded" | "dropped")
    speculation: Speculation | None = None
    again_unix_s: float = math.inf  # only without entries: the policy waits until then on purpose
    repeats: int = 1  # more than 1 only in a choice that has nothing but entries


@dataclass(frozen=True, slots=True)
class Admission:
    """A policy's answer to one offer: accepted as offered, or declined. `earliest_s`: seconds from
    now until it may be worth asking again; None if unknown.
    """

    accepted: bool
    earliest_s: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that left for good. Policies learn decode lengths from it."""

    application: str
    prompt_tokens: int
    max_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Drafts:
    """The yield of speculation in one iteration, a row for each entry that drafted. Policies learn
    acceptance from it.
    """

    tbt_s: Floats  # of the request, which tells its tier
    application: Ints  # index into the view's `applications`
    drafted: Ints  # tokens verified, without the root
    accepted: Ints  # drafts accepted among these


@dataclass(frozen=True, slots=True)
class Observation:
    """One acked iteration, as it was run; an empty shape where requests ended between two
    iterations.

    It may stand for several iterations that were alike: then `shape` and `predicted_s` are those of
    the first, and `exec_s` is the mean.
    """

    at_unix_s: float
    shape: BatchShape
    predicted_s: float
    exec_s: float
    ended: Sequence[Ended] = ()
    drafts: Drafts | None = None
    iterations: int = 1
    late_s: float = 0.0  # after `exec_s`, until the engine was ready for the next one


@dataclass(frozen=True, slots=True)
class Declared:
    """Properties of a policy that the core relies on."""

    drops: bool = False  # the policy may release requests as "dropped"
    # the pools of the replicas, in turn, of fleets that do not configure them (simulated ones)
    pools: Sequence[str] = ("",)


class Policy(Protocol):
    """A policy: pure decisions. `name` chooses it on the command line."""

    name: str
    declared: Declared

    def admit(self, view: View, offers: Sequence[Offer]) -> Sequence[Admission]:
        """Answer offers that came together, jointly: one answer per offer, in order. Earlier
        promises stand.
        """

    def plan(self, view: View) -> Sequence[Choice]:
        """Choose 1..H iterations, the first to run next. The core uses the rest while nothing but
        progress happens. An arrival, an end, an expiry, entries cut for want of KV, or an ack
        outside the bounds of the view make it ask again; accepted drafts do not.
        """

    def observe(self, seen: Observation) -> None:
        """Learn from an acked iteration."""
