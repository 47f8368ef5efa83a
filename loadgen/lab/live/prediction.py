"""The simulator's prediction of a load that a live fleet served, from what was measured there: the
profile of its iterations, by how much each took longer, the cost of its draft model, and how many
drafts were accepted.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from loadgen.lab.live.iterations import Iteration
from loadgen.load.mix import PlannedRequest
from loadgen.simulator.deployment import ACCEPTANCE, Deployment, EngineFacts, ReplicaFacts
from loadgen.simulator.latency import Latency
from loadgen.simulator.misjudged import Scatter, size_of
from loadgen.simulator.simulation import SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from loadgen.trials.comparison import Contestant
from shared.perf.draft import Draft, DraftCost
from shared.perf.fitting import Timed, fit, non_negative
from shared.perf.iteration_time import Profile
from shared.perf.profile_file import ProfileFile
from shared.policy.seam import Floats
from shared.policy.speculation import draft_s
from shared.rules.tiers import TierSet
from shared.schemas import Announce

LEAST_ACCEPTANCE, MOST_ACCEPTANCE = 0.01, 0.99
LEAST = 0.001  # a fraction of 0 would mean that there is no draft


class Measured(NamedTuple):
    """The replica as its iterations show it."""

    file: ProfileFile
    draft: DraftCost
    acceptance: float
    # each iteration took so many times what the profile says; its fit passes over stalls
    scatter: Scatter


def measured(
    iterations: Sequence[Iteration], announce: Announce, acceptance: float | None
) -> Measured:
    """`acceptance`: as `acceptance_of` found it in another run; None: by these iterations."""
    file = profile_of(iterations, announce)
    profile = file.profile()
    known = acceptance if acceptance is not None else acceptance_of(iterations)
    took_s = np.array([one.pass_s + one.late_s for one in iterations])
    told_s = np.array([profile.batch_s(one.shape) for one in iterations])
    return Measured(
        file,
        cost_of(iterations, profile, announce.draft),
        ACCEPTANCE if known is None else known,
        _by_size(iterations, took_s / told_s),
    )


def _by_size(iterations: Sequence[Iteration], times: Floats) -> Scatter:
    """The `times` of these iterations, in their order."""
    found: dict[int, list[float]] = {}
    for one, each in zip(iterations, times.tolist(), strict=True):
        found.setdefault(size_of(one.shape), []).append(each)
    return found


def profile_of(iterations: Sequence[Iteration], announce: Announce) -> ProfileFile:
    """Fitted to these iterations without drafting, and with their hand-overs."""
    return fit(
        [Timed(one.shape, one.pass_s + one.late_s) for one in iterations if one.pass_s > 0],
        name="as-served",
        gpu=announce.engine,
        model=announce.model,
        kv_capacity_tokens=announce.kv_blocks * announce.block_tokens,
        provenance="fitted to the iterations of a live run",
    )


def cost_of(iterations: Sequence[Iteration], profile: Profile, announced: DraftCost) -> DraftCost:
    """(step, read) of the draft model, by least squares of the seconds that drafting took: long
    drafting counts for more. As announced where no iteration tells.
    """
    drafting = [one for one in iterations if one.trees is not None]
    if not drafting:
        return announced
    units = (Draft(profile, 1.0, 0.0), Draft(profile, 0.0, 1.0))
    design = np.array(
        [
            [draft_s(unit, **one.trees._asdict()) for unit in units]
            for one in drafting
            if one.trees is not None
        ]
    )
    step, read = non_negative(design, np.array([one.draft_s for one in drafting]))
    return min(max(float(step), LEAST), 1.0), min(max(float(read), LEAST), 1.0)


def acceptance_of(iterations: Sequence[Iteration]) -> float | None:
    """The probability that a draft is accepted if those before it are: with it, chains as long as
    these have as many accepted. It is the model's own where all decodes draft; a policy that
    verifies the likeliest drafts alone sees more. Of trees it is the share of verifications whose
    first draft was accepted. None without any.
    """
    verifications = sum(one.verifications for one in iterations)
    if not verifications:
        return None
    if any(one.trees is not None and one.trees.width.max() > 1 for one in iterations):
        share = sum(one.first_accepted for one in iterations) / verifications
        return min(max(share, LEAST_ACCEPTANCE), MOST_ACCEPTANCE)
    depth = sum(one.drafted for one in iterations) / verifications
    accepted = sum(one.accepted for one in iterations) / verifications
    low, high = LEAST_ACCEPTANCE, MOST_ACCEPTANCE
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if _of_chain(middle, depth) < accepted else (low, middle)
    return high


def _of_chain(acceptance: float, depth: float) -> float:
    """The drafts that are accepted of a chain so deep, in the mean."""
    whole, part = divmod(depth, 1.0)
    of_whole = acceptance * (1 - acceptance**whole) / (1 - acceptance)
    return float(of_whole + part * acceptance ** (whole + 1))


def foretell(
    contestant: Contestant,
    requests: Sequence[PlannedRequest],
    tiers: TierSet,
    seed: int,
    facts: Announce,
    found: Measured,
    folder: Path,
) -> SimulationResult:
    """The same requests served by the simulator. Its planner knows what the live one knew: what the
    worker announced.
    """
    served, announced = folder / "as-served.json", folder / "announced.json"
    served.write_bytes(msgspec.json.encode(found.file))
    if facts.fitted is not None:
        announced.write_bytes(msgspec.json.encode(facts.fitted))
    deployment = Deployment(
        contestant.policy,
        facts.profile if facts.fitted is None else str(announced),
        1,
        contestant.settings,
        Latency.live(),
        ReplicaFacts(
            kv_blocks=facts.kv_blocks,
            block_tokens=facts.block_tokens,
            context_tokens=facts.context_tokens,
            max_slots=facts.max_slots,
        ),
        draft=facts.draft,
        acceptance=found.acceptance,
        engine=EngineFacts(str(served), found.draft, facts.longest_chain),
        engine_scatter=found.scatter,
    )
    return simulate(Traffic(requests, tiers, seed), deployment)
