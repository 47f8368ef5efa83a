"""Makes schedules for the tests of the bound. Each serves all its requests, with SLOs and KV that
are as tight as the schedule allows, so a right bound finds none of them impossible.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from loadgen.bound.instance import BLOCK_TOKENS
from loadgen.load.mix import PlannedRequest
from loadgen.simulator.token_times import measured
from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.rules.tiers import Tier, TierSet
from shared.vocabulary import Definition, Slo
from tests.loadgen import planned

BUDGETS_TOKENS = (64, 256, 512, 2048, 4096)


@dataclass(slots=True)
class Served:
    """A request while it is served, and its outcome: `token_at_s` runs along its output."""

    prompt_tokens: int
    output_tokens: int
    arrival_s: float = 0.0
    cached_tokens: int = 0
    token_at_s: list[float] = field(default_factory=list)

    @property
    def context_tokens(self) -> int:
        """The tokens that must be computed before its next token."""
        return self.prompt_tokens + len(self.token_at_s)

    @property
    def ended(self) -> bool:
        return len(self.token_at_s) == self.output_tokens


@dataclass(frozen=True, slots=True)
class Schedule:
    """Requests as they were served. `kv_tokens`: the most that any replica ever held, in whole
    blocks.
    """

    profile: Profile
    replicas: int
    kv_tokens: int
    served: Sequence[Served]


def drawn(rng: Random, count: int, prompt: int, output: int, spread: float) -> list[Served]:
    """Requests with lengths around those given; with a `spread` of 0 all are alike."""

    def tokens(median: int) -> int:
        return min(4000, max(1, int(rng.lognormvariate(0, spread) * median)))

    return [Served(tokens(prompt), tokens(output)) for _ in range(count)]


def steady(
    profile: Profile, queue: Sequence[Served], streams: int, *, waits: bool = False
) -> Schedule:
    """Serve so many requests at a time on one replica: a request that ends is replaced at once,
    every prompt is one chunk, and all requests decode in every iteration.

    With as many streams as requests, all run in lock-step. `waits`: all arrive at the beginning.
    """
    waiting, live, now_s, held = list(queue), list[Served](), 0.0, 0
    while waiting or live:
        while waiting and len(live) < streams:
            live.append(waiting.pop(0))
            live[-1].arrival_s = 0.0 if waits else now_s
        now_s += _iterate(
            profile, now_s, [(one, one.context_tokens - one.cached_tokens) for one in live]
        )
        held = max(held, sum(one.cached_tokens for one in live))
        live = [one for one in live if not one.ended]
    return _schedule(profile, 1, held, queue)


def haphazard(rng: Random, profile: Profile, queues: Sequence[Sequence[Served]]) -> Schedule:
    """Serve each queue on a replica of its own, with chunks of any length, pauses, and preemptions
    that lose the whole KV of a request.
    """
    held = 0
    for queue in queues:
        waiting, live, now_s = list(queue), list[Served](), 0.0
        while waiting or live:
            while waiting and len(live) < rng.choice([1, 4, 16, 64]):
                live.append(waiting.pop(0))
                live[-1].arrival_s = now_s
            if rng.random() < 0.03:
                rng.choice(live).cached_tokens = 0
            budget, work = rng.choice(BUDGETS_TOKENS), list[tuple[Served, int]]()
            for one in live:
                if (
                    rng.random() < 0.93
                    and (new := min(budget, one.context_tokens - one.cached_tokens)) > 0
                ):
                    work.append((one, new))
                    budget -= new
            if work:
                now_s += _iterate(profile, now_s, work)
            held = max(held, sum(one.cached_tokens for one in live))
            live = [one for one in live if not one.ended]
    return _schedule(profile, len(queues), held, [one for queue in queues for one in queue])


def followed_by(first: Schedule, then: Schedule) -> Schedule:
    """The second schedule after the end of the first, on the same replicas."""
    ended_s = max(one.token_at_s[-1] for one in first.served)
    for one in then.served:
        one.arrival_s += ended_s
        one.token_at_s = [at_s + ended_s for at_s in one.token_at_s]
    return Schedule(
        first.profile,
        first.replicas,
        max(first.kv_tokens, then.kv_tokens),
        [*first.served, *then.served],
    )


def _iterate(profile: Profile, now_s: float, work: Sequence[tuple[Served, int]]) -> float:
    """Run an iteration; returns its seconds. A request whose context is computed at its end gets a
    token; one new token on a context is a decode.
    """
    decodes = [one for one, new in work if new == 1 and one.token_at_s and one.cached_tokens]
    shape = BatchShape(
        decodes=len(decodes), decode_context=sum(one.cached_tokens for one in decodes)
    )
    for one, new in work:
        if not any(one is decode for decode in decodes):
            shape = shape.with_chunk(new, one.cached_tokens)
    took_s = profile.batch_s(shape)
    for one, new in work:
        one.cached_tokens += new
        if one.cached_tokens == one.context_tokens:
            one.token_at_s.append(now_s + took_s)
    return took_s


def _schedule(
    profile: Profile, replicas: int, held_tokens: int, served: Sequence[Served]
) -> Schedule:
    # The bound ends an output where the KV ends: a whole output needs room for all its tokens.
    held_tokens = max(held_tokens, *(one.prompt_tokens + one.output_tokens for one in served))
    kv_tokens = math.ceil(held_tokens / BLOCK_TOKENS) * BLOCK_TOKENS
    return Schedule(profile, replicas, kv_tokens, sorted(served, key=lambda one: one.arrival_s))


def just_kept(
    schedule: Schedule,
    definition: Definition,
    bounds: Sequence[Sequence[str]],
    *,
    common: bool,
    part: float = 1.0,
) -> tuple[list[PlannedRequest], TierSet]:
    """The requests with SLOs that they just keep: the n-th has the n-th bounds (the last bounds
    serve all further ones), each `part` of the latency that the request had.

    `common`: each bound is `part` of the worst latency of all requests.
    """
    given = [
        {
            "ttft_s": one.token_at_s[0] - one.arrival_s,
            "tbt_s": pace_s(one, definition),
            "ttlt_s": one.token_at_s[-1] - one.arrival_s,
        }
        for one in schedule.served
    ]
    if common:
        given = [{name: max(one[name] for one in given) for name in given[0]}] * len(given)
    tiers = {
        f"t{i}": Tier(
            slo=Slo(**{name: part * one[name] for name in bounds[min(i, len(bounds) - 1)]})
        )
        for i, one in enumerate(given)
    }
    requests = [
        planned.one(i, one.prompt_tokens, one.output_tokens, f"t{i}", one.arrival_s)
        for i, one in enumerate(schedule.served)
    ]
    return requests, TierSet(name="just kept", default="t0", tiers=tiers)


def pace_s(one: Served, definition: Definition) -> float:
    """The TBT that the request kept, given the TTFT that it had; any value for a single token."""
    after_s = np.array(one.token_at_s[1:]) - one.token_at_s[0]
    if not len(after_s):
        return 0.01
    if definition is Definition.MAX_TPOT_10:
        judged = Slo(tbt_s=1.0, definition=definition)
        windows = measured(array("d", one.token_at_s), judged, one.arrival_s).windows
        assert windows is not None
        return windows.present_s()
    if definition in (Definition.MEAN_TPOT, Definition.TTLT):
        return float(after_s[-1]) / len(after_s)
    if definition is Definition.EVERY_GAP:
        return float(np.diff(one.token_at_s).max())
    assert definition is Definition.DEADLINE
    return float((after_s / np.arange(1, len(after_s) + 1)).max())
