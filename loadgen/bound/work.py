"""The work that each request asks of the replicas if its SLO is to be met: its prompt, its decode
steps, and the windows of both. Where the work is not exact it is an underestimate, since
the bound (docs/bound.md) may exclude no request that some scheduler could serve in time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from loadgen.load.mix import PlannedRequest
from shared.errors import ConfigError
from shared.measure import CLOSE_S, WINDOW_TOKENS
from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.perf.zero_load import CHUNK_TOKENS, ttft_s
from shared.rules.tiers import TierSet
from shared.vocabulary import Definition, Slo

MAX_TPOT_10, TTLT = Definition.MAX_TPOT_10, Definition.TTLT
Seconds = NDArray[np.float64]
Tokens = NDArray[np.int64]

# Added to every deadline, and CLOSE_S more for each step: it covers the rounding of sums of
# seconds, and the tolerance that means have for each token.
ROUNDING_S = 1000 * CLOSE_S


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """The work of requests; columns run along them. A prompt is computed in
    [arrival_s, prompt_due_s]; `steps` decode steps follow in [steps_from_s, due_s].

    Step k = 1, 2, ... is due at step_due_s + k * pace_s, or at due_s, whichever is earlier.
    Deadlines may be inf.
    """

    arrival_s: Seconds
    prompt_tokens: Tokens
    # output tokens after the first, which comes with the prompt's last chunk; 0 if they are never
    # due
    steps: Tokens
    prompt_due_s: Seconds
    steps_from_s: Seconds
    step_due_s: Seconds
    pace_s: Seconds
    due_s: Seconds
    hopeless: NDArray[np.bool_]  # late or too large even alone on a replica

    def only(self, kept: NDArray[np.bool_]) -> "Work":
        return Work(*(getattr(self, field.name)[kept] for field in fields(self)))


def work_of(
    requests: Sequence[PlannedRequest],
    tiers: TierSet,
    profile: Profile,
    kv_tokens: int,
    alone_s: Seconds,
    found: Tokens | int = 0,
) -> Work:
    """The work of these requests. `alone_s[p]`: the least time of the iterations that compute p
    prompt tokens. `found`: the most tokens of each prompt that others may have computed before it
    comes. Raises ConfigError.
    """
    slos = {name: _in_seconds(tier.slo) for name, tier in tiers.tiers.items()}
    if unknown := sorted({r.tier for r in requests} - set(slos)):
        raise ConfigError(f"tiers {tiers.name}: there is none named {', '.join(unknown)}")
    arrival_s = np.array([r.arrival_s for r in requests])
    prompt = np.array([r.prompt_tokens for r in requests], dtype=np.int64)
    # An output ends where the memory does, as in the simulator.
    steps = np.minimum([r.output_tokens for r in requests], np.maximum(kv_tokens - prompt, 1)) - 1
    owed = [
        _with_first_s(slos[r.tier], tiers.tiers[r.tier].slo.ttft_x, r.prompt_tokens, profile)
        for r in requests
    ]
    after_s = np.array(
        [_after_s(slo, count) for slo, count in zip(owed, steps.tolist(), strict=True)]
    )
    rounding_s = ROUNDING_S + steps * CLOSE_S
    first_due_s, due_s, step_due_s = (arrival_s + rounding_s) + after_s[:, :3].T
    pace_s = after_s[:, 3]
    # A step is an iteration, which takes at least as long as without other requests in it: as a
    # decode, or as the end of computing its context anew.
    anew_s = profile.batch_s(BatchShape().with_chunk(1, 0))
    step_alone = {
        p: min(anew_s, profile.batch_s(BatchShape(decodes=1, decode_context=p)))
        for p in set(prompt.tolist())
    }
    steps_s = steps * np.array([step_alone[p] for p in prompt.tolist()])
    prompt_due_s, steps_from_s = (
        np.minimum(first_due_s, due_s - steps_s),
        arrival_s + np.maximum(alone_s[prompt] - alone_s[found], 0.0),
    )
    hopeless = (steps_from_s > prompt_due_s) | (prompt > kv_tokens)
    # Steps without a deadline may wait until everything else is over.
    steps = np.where(np.isfinite(due_s), steps, 0)
    return Work(
        arrival_s, prompt, steps, prompt_due_s, steps_from_s, step_due_s, pace_s, due_s, hopeless
    )


def _in_seconds(slo: Slo) -> Slo:
    """The SLO without the multiples of zero-load time, which differ from request to request."""
    # By the other definitions each bound only adds deadlines, so dropping it relaxes. By ttlt
    # a TTLT or a pace removes the deadlines of the other bounds.
    definition = slo.definition
    if definition is TTLT and slo.in_multiples:
        return Slo(definition=definition)
    # a gap that may be longer may be of any length, so then there is no pace
    free = definition is Definition.EVERY_GAP and slo.long_gap_share
    tbt_s = None if free else slo.tbt_s
    # The looser of two paces. Two stages with windows of their own may each be late by most of a
    # window, so there is no pace then.
    if slo.thinks:
        tbt_s = None if definition is MAX_TPOT_10 or tbt_s is None else max(tbt_s, slo.pace_s(True))
    return Slo(ttft_s=slo.ttft_s, tbt_s=tbt_s, ttlt_s=slo.ttlt_s, definition=definition)


def _with_first_s(slo: Slo, times: float | None, prompt_tokens: int, profile: Profile) -> Slo:
    """The SLO with its TTFT in multiples of the request's own zero-load TTFT, as admission resolves
    it. The other multiples depend on the longest output.
    """
    if times is None or slo.definition is TTLT:
        return slo
    return replace(
        slo, ttft_s=min(_or_inf(slo.ttft_s), times * ttft_s(profile, prompt_tokens, CHUNK_TOKENS))
    )


def _after_s(slo: Slo, steps: int) -> tuple[float, float, float, float]:
    """Seconds after arrival: the deadline of the first token, that of the last one, and that of
    step k as a start and a pace.

    Source: shared/core/record/judgement.py; deviation: weaker where a definition does not judge by
    deadlines (docs/bound.md, 2).
    """
    definition, first_s, last_s = slo.definition, _or_inf(slo.ttft_s), _or_inf(slo.ttlt_s)
    paced = slo.ttft_s is not None and slo.tbt_s is not None
    tbt_s = slo.tbt_s if slo.tbt_s is not None else 0.0
    by_pace_s = first_s + steps * tbt_s if paced else math.inf
    if definition is TTLT:
        if slo.ttlt_s is not None or slo.tbt_s is not None:
            first_s = math.inf
        last_s = last_s if slo.ttlt_s is not None else by_pace_s
        return first_s, last_s, last_s, 0.0
    if definition is MAX_TPOT_10 and steps > WINDOW_TOKENS:
        # Ten tokens may come together at the end of their window, and the last ten overlap those
        # before.
        by_pace_s += (WINDOW_TOKENS - 1) * tbt_s
        start_s = first_s + (WINDOW_TOKENS - 1) * tbt_s
    else:
        start_s = first_s
    last_s = min(last_s, by_pace_s)
    if (
        paced
        and definition in (Definition.DEADLINE, Definition.EVERY_GAP, MAX_TPOT_10)
        and not (definition is MAX_TPOT_10 and steps <= WINDOW_TOKENS)
    ):
        return first_s, last_s, start_s, tbt_s
    return first_s, last_s, last_s, 0.0


def _or_inf(bound_s: float | None) -> float:
    return math.inf if bound_s is None else bound_s
