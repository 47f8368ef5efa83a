"""An upper limit on the fraction of requests that any scheduler could satisfy, even one that knows
the future. docs/bound.md has the proof.
"""

import math
import time
from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from loadgen.bound.common import common
from loadgen.bound.instance import Instance
from loadgen.bound.relaxations import met_by_relaxation
from loadgen.load.mix import PlannedRequest
from shared.errors import ConfigError
from shared.perf import profile_file as profiles
from shared.rules.tiers import TierSet

SLIVER = 1e-6  # of a request: more than rounding can take from a bound


class Bound(Struct, frozen=True, kw_only=True):
    """No scheduler meets more than `met_fraction`. `by`: the relaxation that says so."""

    met_fraction: float
    violated_fraction: float  # the least possible
    by: str
    met_by: dict[str, float]  # the met fraction that each relaxation allows
    wall_s: float


def bound(
    requests: Sequence[PlannedRequest],
    tiers: TierSet,
    profile_name: str,
    replicas: int,
    kv_tokens: int | None = None,
) -> Bound:
    """The bound of these requests by the definitions of their tiers. `kv_tokens`: of each replica;
    None: what the profile states.

    Later rounds of a session count as met, and as no work, since their arrival is not known
    beforehand. Of the bounds in multiples of zero-load time only a TTFT counts; by `ttlt` none of
    them counts, nor any other bound of their tier.
    Raises: ConfigError for an unknown profile or tier, or no replicas.
    """
    began_s = time.perf_counter()
    if replicas < 1:
        raise ConfigError("there must be at least one replica")
    file = profiles.read(profile_name)
    met_by = {"none": 1.0}
    first = [request for request in requests if request.after is None]
    if first:
        # rounds that count as no work may have computed what others need
        rounds = np.array([request.after is not None for request in requests])
        shared = common(requests).only(~rounds)
        kv_tokens = file.kv_capacity_tokens if kv_tokens is None else kv_tokens
        instance = Instance(first, tiers, file.profile(), kv_tokens, replicas, shared)
        # Only whole requests are satisfied, so a fraction of one more counts as none.
        later = len(requests) - len(first)
        met_by = {
            name: (later + min(math.floor(met + SLIVER), len(first))) / len(requests)
            for name, met in met_by_relaxation(instance).items()
        }
    by = min(met_by, key=lambda name: met_by[name])
    return Bound(
        met_fraction=met_by[by],
        violated_fraction=1.0 - met_by[by],
        by=by,
        met_by=met_by,
        wall_s=time.perf_counter() - began_s,
    )


def alone(requests: Sequence[PlannedRequest], tiers: TierSet, profile_name: str) -> int:
    """The number of these requests that a scheduler without a draft model could satisfy with a
    replica for each. Later rounds of a session count as satisfied.
    """
    file = profiles.read(profile_name)
    first = [request for request in requests if request.after is None]
    later = len(requests) - len(first)
    if not first:
        return later
    shared = common(requests).only(np.array([request.after is None for request in requests]))
    instance = Instance(first, tiers, file.profile(), file.kv_capacity_tokens, 1, shared)
    return later + len(instance.work.steps) + instance.unbounded
