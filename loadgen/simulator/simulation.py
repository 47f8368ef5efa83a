"""The virtual driver: the cores that run live, over as many replicas as wanted, in virtual time,
with a profile as the GPU.

Nothing is lost and nothing dies here (the simulation of the protocol is another one).
Deterministic: the same arguments give the same result to the last digit, wall time apart.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from loadgen.simulator.latency import Latency
from loadgen.simulator.timeline import Timeline
from loadgen.simulator.virtual_fleet import ADMISSION, VirtualFleet
from loadgen.simulator.virtual_replica import VirtualReplica
from shared.core.admission import AdmissionSettings
from shared.core.relegation import RelegationSettings
from shared.core.verdict import GOOD_ENDS
from shared.errors import ConfigError
from shared.perf import profile_file as profiles
from shared.perf.iteration_time import Profile
from shared.perf.scaled import draft_of
from shared.perf.zero_load import zero_load
from shared.policy import registry
from shared.policy.acceptance import Acceptance
from shared.schemas import Announce, Body, Record, Sampling, Verdict
from shared.tiers import TierSet
from shared.vocabulary import RecordState, ReplicaId, RequestKey, ServiceClass, Slo

STALL_S = 3600.0  # without a token for so long after the last arrival, something hangs
EXPIRES_S = 172_800.0  # longest a request may stay unfinished: the default of GenerateRequest
ZERO_LOAD_CHUNK_TOKENS = 2048  # what SLOs given as multiples are multiples of, as admission has it
DRAFT, ACCEPTANCE = 0.05, 0.7  # of the draft model, where nobody says otherwise: stated choices
# max_tokens is the longest output rounded up to this, the same for all: it tells nobody their
# length
OUTPUT_STEP_TOKENS = 1024


class Planned(Protocol):
    """One request that will arrive: loadgen's plans are made of these."""

    @property
    def number(self) -> int: ...
    @property
    def arrival_s(self) -> float: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def tier(self) -> str: ...
    @property
    def importance(self) -> float: ...
    @property
    def tenant(self) -> str: ...
    @property
    def application(self) -> str: ...
    @property
    def thinking_tokens(self) -> int: ...
    @property
    def after(self) -> int | None: ...  # the request whose good end it waits for
    @property
    def pause_s(self) -> float: ...  # after that


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """What a replica is given; `kv_blocks` 0: what the profile states."""

    kv_blocks: int = 0
    block_tokens: int = 16
    context_tokens: int = 8192
    max_slots: int = 16_384  # as the papers' queues: as long as they get


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Lists run along the requests given. A verdict is None where the horizon came first, and of
    the rounds after one that failed; times only if they were asked for.
    """

    verdicts: Sequence[Verdict | None]
    slos: Sequence[Slo]
    token_unix_s: Sequence[Sequence[float]] | None
    iterations: int
    tokens: int
    preempted: int  # times a request's KV was given up
    forced_preemptions: int  # of these, by the core because nothing else fitted
    mispredicted_entries: int
    offloaded: int  # times a request was given to another replica, to be served sooner there
    busy_s: float  # engine seconds, all replicas
    idle_s: float  # engines waited for a plan while they held work
    drafted: int  # draft tokens verified
    accepted: int  # of these
    verifications: int  # entries that had drafts verified, over all iterations
    simulated_s: float
    wall_s: float
    events: int
    stopped: bool = False  # early: more than `most_missed` had missed

    @property
    def relegated(self) -> int:
        return sum(verdict is not None and verdict.relegated for verdict in self.verdicts)

    @property
    def finished(self) -> int:
        return sum(verdict is not None and verdict.output_tokens > 0 for verdict in self.verdicts)

    @property
    def met_fraction(self) -> float:
        """Of all requests; unfinished ones count as missed."""
        return sum(verdict is not None and verdict.slo_met for verdict in self.verdicts) / max(
            1, len(self.verdicts)
        )


def simulate(
    requests: Sequence[Planned],
    policy: str,
    settings: Mapping[str, str] | None,
    profile: str,
    replicas: int,
    tiers: TierSet,
    latency: Latency,
    seed: int,
    *,
    draft: float = DRAFT,
    acceptance: float = ACCEPTANCE,
    facts: ReplicaFacts | None = None,
    hand_back: bool = True,
    admission: AdmissionSettings | None = None,
    relegation: RelegationSettings | None = None,
    keep_times: bool = False,
    check_every: int = 0,
    horizon_s: float | None = None,
    most_missed: int | None = None,
    misses: Callable[[Verdict, Slo, Sequence[float]], bool] | None = None,
    leaps: bool = True,
    progress: Callable[[float, int], None] | None = None,
) -> SimulationResult:
    """Serve these requests (in order of arrival; one `after` another comes when that has ended
    well, and its pause) until all have ended, or until `horizon_s`, or until more than
    `most_missed` have ended without their SLO: who only wants to know whether a rate is too high
    need not see the rest. `misses` says of a request that ended, with its token times if they are
    kept, whether it did so without its SLO;
    None: as its verdict has it. Rounds that are never sent have missed it.

    draft: what a draft model's iteration takes, as a fraction of the target's, for policies that
        speculate; 0: there is none.
    acceptance: with which probability its first token is accepted, in the mean (acceptance.py).
    leaps: iterations that are alike are run as one where control takes no time
        (virtual_replica.py); False: each by itself.
    check_every: events between checks of all books, 0 for none. progress: told now and then
        (virtual seconds, requests ended).
    Raises: ConfigError for an unknown policy, setting or profile, an impossible draft or
        acceptance; AssertionError where an invariant breaks; RuntimeError on a stall.
    """
    began_s = time.perf_counter()
    facts = facts or ReplicaFacts()
    file = profiles.read(profile)
    model = file.profile()
    drafting, accepting = draft_of(model, draft), Acceptance(acceptance)
    if replicas < 1:
        raise ConfigError("there must be at least one replica")
    kv_blocks = facts.kv_blocks or file.kv_capacity_tokens // facts.block_tokens
    context_tokens = min(facts.context_tokens, kv_blocks * facts.block_tokens)
    timeline = Timeline(requests[0].arrival_s if requests else 0.0)
    verdicts: dict[RequestKey, Verdict] = {}
    missed = 0

    def on_end(record: Record) -> None:
        nonlocal missed
        assert record.verdict is not None and record.key not in verdicts, (
            f"{record.key} ended twice"
        )
        verdicts[record.key] = record.verdict
        late = (
            not record.verdict.slo_met
            if misses is None
            else misses(record.verdict, record.slo, fleet.times.get(record.key, ()))
        )
        missed += late
        if (later := followers.pop(record.key, None)) is None:
            return
        if record.verdict.finish_reason in GOOD_ENDS:
            timeline.after(requests[later].pause_s, receive, later)
        else:
            unsent.extend(rounds_from(later))

    pools = registry.make(policy, settings).declared.pools
    fleet = VirtualFleet(
        timeline,
        latency,
        registry.make(policy, settings).route,
        Random(f"{seed}/router"),
        on_end,
        admission_settings=admission,
        relegation_settings=relegation,
        keep_times=keep_times,
    )
    members = [
        VirtualReplica(
            Announce(
                replica=ReplicaId(f"r{i + 1:02}"),
                incarnation="1",
                at_unix_s=timeline.now_s,
                model=file.model,
                engine="virtual",
                profile=profile,
                pool=pools[i % len(pools)],
                kv_blocks=kv_blocks,
                block_tokens=facts.block_tokens,
                context_tokens=context_tokens,
                max_slots=facts.max_slots,
                epoch=0,
            ),
            registry.make(policy, settings),
            model,
            drafting,
            accepting,
            timeline,
            latency,
            fleet,
            hand_back=hand_back,
            leaps=leaps,
        )
        for i in range(replicas)
    ]
    fleet.start(members)
    longest = max((r.output_tokens for r in requests), default=1)
    most_tokens = -(-longest // OUTPUT_STEP_TOKENS) * OUTPUT_STEP_TOKENS
    keys, slos = (
        [_key(request) for request in requests],
        [tiers.named(request.tier).slo for request in requests],
    )
    index = {request.number: i for i, request in enumerate(requests)}
    followers = {keys[index[r.after]]: i for i, r in enumerate(requests) if r.after is not None}
    arrivals = deque(i for i, request in enumerate(requests) if request.after is None)
    unsent: list[int] = []  # rounds that never will be: one before them failed
    last_s, iterations = timeline.now_s, 0

    def rounds_from(i: int) -> list[int]:
        """This round of its session and those after it."""
        later = followers.pop(keys[i], None)
        return [i] if later is None else [i, *rounds_from(later)]

    def receive(i: int) -> None:
        record, body = stored_as(
            requests[i], tiers, model, context_tokens, most_tokens, timeline.now_s
        )
        slos[i] = record.slo
        fleet.receive(record, body)

    def arrive() -> None:
        """Each arrival schedules the next, so that a long trace is not a long heap."""
        i = arrivals.popleft()
        if arrivals:
            timeline.at(requests[arrivals[0]].arrival_s, arrive)
        receive(i)

    if requests:
        timeline.at(requests[0].arrival_s, arrive)
    limit = len(requests) if most_missed is None else most_missed
    while (
        len(verdicts) + len(unsent) < len(requests)
        and missed + len(unsent) <= limit
        and (horizon_s is None or timeline.next_s <= horizon_s)
    ):
        timeline.step()
        if check_every and timeline.calls % check_every == 0:
            fleet.check()
        if not timeline.calls & 0xFFFF:
            done = sum(member.worker.counters.iterations for member in members)
            if done != iterations or arrivals:
                last_s, iterations = timeline.now_s, done
            elif timeline.now_s - last_s > STALL_S:
                raise RuntimeError(
                    f"nothing has moved since {last_s:.1f} s, and {len(requests) - len(verdicts)} requests have not ended"
                )
            if progress is not None:
                progress(timeline.now_s, len(verdicts))
    stopped = missed + len(unsent) > limit
    if len(verdicts) + len(unsent) < len(requests):  # what has been done by then counts
        if horizon_s is not None and not stopped:
            timeline.now_s = max(timeline.now_s, horizon_s)
        for member in members:
            member.settle()
    if check_every:
        fleet.check()
    counters = [member.worker.counters for member in members]
    return SimulationResult(
        verdicts=[verdicts.get(key) for key in keys],
        slos=slos,
        token_unix_s=[fleet.times.get(key, array("d")) for key in keys] if keep_times else None,
        stopped=stopped,
        iterations=sum(c.iterations for c in counters),
        tokens=sum(c.tokens for c in counters),
        preempted=sum(member.preempted for member in members),
        forced_preemptions=sum(member.core.counters.forced_preemptions for member in members),
        mispredicted_entries=sum(member.core.counters.mispredicted_entries for member in members),
        offloaded=fleet.offloaded,
        busy_s=sum(c.exec_s for c in counters),
        idle_s=sum(c.idle_s for c in counters),
        drafted=sum(c.drafted for c in counters),
        accepted=sum(c.accepted for c in counters),
        verifications=sum(c.verifications for c in counters),
        simulated_s=timeline.now_s - (requests[0].arrival_s if requests else 0.0),
        wall_s=time.perf_counter() - began_s,
        events=timeline.calls,
    )


def stored_as(
    planned: Planned,
    tiers: TierSet,
    profile: Profile,
    context_tokens: int,
    most_tokens: int,
    now_unix_s: float,
) -> tuple[Record, Body]:
    """The record as admission would store it, not yet placed, and a body without its prompt, which
    nobody here reads.

    Raises ConfigError for a request that no replica can hold.
    """
    room = context_tokens - planned.prompt_tokens
    if room < 1 or planned.prompt_tokens < 1:
        raise ConfigError(
            f"request {planned.number} has a prompt of {planned.prompt_tokens} tokens; a replica holds {context_tokens}"
        )
    max_tokens = min(most_tokens, room)
    slo = tiers.named(planned.tier).slo
    if (slo.ttft_x, slo.tbt_x, slo.ttlt_x) != (None, None, None):
        alone = zero_load(profile, planned.prompt_tokens, max_tokens, ZERO_LOAD_CHUNK_TOKENS)
        slo = slo.resolved(
            zero_load_ttft_s=alone.ttft_s,
            zero_load_tbt_s=alone.tbt_s,
            zero_load_ttlt_s=alone.ttlt_s,
        )
    record = Record(
        key=_key(planned),
        body_key="",
        owner=ADMISSION,
        state=RecordState.ACTIVE,
        attempt=0,
        service_class=ServiceClass.STANDARD,
        tier=planned.tier,
        slo=slo,
        importance=planned.importance,
        application=planned.application or planned.tier,
        session="",
        arrived_unix_s=now_unix_s,
        expires_unix_s=now_unix_s + EXPIRES_S,
        prompt_tokens=planned.prompt_tokens,
        max_tokens=max_tokens,
        stream_subject="",
    )
    sampling = Sampling(
        max_tokens=max_tokens,
        output_tokens=planned.output_tokens,
        thinking_tokens=planned.thinking_tokens,
        ignore_eos=True,
        temperature=0.0,
    )
    return record, Body(prompt=b"", sampling=sampling)


def _key(planned: Planned) -> RequestKey:
    return RequestKey(f"{planned.tenant}.{planned.number}")
