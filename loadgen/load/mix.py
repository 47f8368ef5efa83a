"""Makes the plan of a run: the arrival, the lengths and the tier of each request. The plan is the
same for the same seed, whatever serves it.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from random import Random
from typing import NamedTuple

from loadgen.load.workload import LengthSource
from shared.errors import ConfigError
from shared.prefix import Piece
from shared.rules.tiers import TierSet
from shared.subjects import DEFAULT_TENANT

IMPORTANT = 10.0  # a paying caller weighs as much as ten others


class PlannedRequest(NamedTuple):
    number: int  # 0, 1, ... in order of arrival
    arrival_s: float  # for a later round, that of its session
    prompt_tokens: int
    output_tokens: int
    tier: str
    importance: float  # of the request: admission multiplies it by that of its tier
    tenant: str
    application: str
    thinking_tokens: int = 0  # of the output
    session: str = ""  # the session whose round it is; empty: it is of none
    # the round of its session that it follows: it is sent when that one has ended well
    after: int | None = None
    pause_s: float = 0.0  # between that end and its sending: the time that a tool takes
    model: str = ""  # empty: it names none
    # what its prompt begins with, and the id of its answer as a piece of later prompts: equal ids
    # stand for equal tokens. The rest of its text is nobody else's
    pieces: tuple[Piece, ...] = ()
    answer: int | None = None

    @property
    def text(self) -> tuple[Piece, ...]:
        """The whole prompt and output in pieces; empty: nobody else has any of it."""
        if not self.pieces and self.answer is None:
            return ()
        own, left = -1 - self.number, self.prompt_tokens - sum(n for _, n in self.pieces)
        answer = own if self.answer is None else self.answer
        return *self.pieces, Piece(own, left), Piece(answer, self.output_tokens)


def plan_requests(
    arrivals_s: Sequence[float],
    lengths: LengthSource,
    tiers: TierSet,
    seed: int,
    tenants: int = 1,
    important: float = 0.0,
) -> list[PlannedRequest]:
    """One planned request per arrival, followed by the later rounds of its session with the same
    arrival; the last round is of the tier's `last_round`. `important` is the fraction of requests
    whose importance is ten times that of the others of their tier. A tier that the trace records
    is taken, any other is drawn by the tiers' shares.

    Each request draws from a generator of its own, (seed, index), so that a change of one does not
    change another. Raises ConfigError for a recorded tier that the set does not have.
    """
    names = list(tiers.tiers)
    shares = list(accumulate(tier.share for tier in tiers.tiers.values()))
    plan: list[PlannedRequest] = []
    for index, arrival_s in enumerate(arrivals_s):
        rng = Random(f"{seed}/{index}")
        rank = rng.choices(range(len(names)), cum_weights=shares)[0]
        weight = IMPORTANT if rng.random() < important else 1.0
        tenant = f"tenant-{rng.randrange(tenants)}" if tenants > 1 else DEFAULT_TENANT
        drawn = lengths.draw(index, rank, rng)
        first = drawn.tier or names[rank]
        if first not in tiers.tiers:
            raise ConfigError(
                f"the trace has a request of tier `{first}`, which the tiers {tiers.name} do not "
                f"have; they have {', '.join(names)}"
            )
        last = None if drawn.tier else tiers.tiers[first].last_round
        rounds, session = (drawn, *drawn.then), f"session-{index}" if drawn.then else ""
        for turn, of in enumerate(rounds):
            name = last if last is not None and turn == len(rounds) - 1 else first
            number = len(plan)
            plan.append(
                PlannedRequest(
                    number,
                    arrival_s,
                    of.prompt_tokens,
                    of.output_tokens,
                    name,
                    weight,
                    tenant,
                    of.application,
                    thinking_tokens=of.thinking_tokens,
                    session=session,
                    after=number - 1 if turn else None,
                    pause_s=of.pause_s,
                    model=drawn.model,
                    pieces=of.pieces,
                    answer=of.answer,
                )
            )
    return plan


def with_models(
    requests: Sequence[PlannedRequest], shares: Mapping[str, float], seed: int
) -> list[PlannedRequest]:
    """The requests, each of which names a model: as recorded, or drawn by these shares. All rounds
    of a session name the same. Raises ConfigError for a recorded model without a share.
    """
    names, weights = list(shares), list(accumulate(shares.values()))
    found = []
    for request in requests:
        model = request.model
        if not model:
            rng = Random(f"{seed}/{request.session or request.number}/model")
            model = rng.choices(names, cum_weights=weights)[0]
        elif model not in shares:
            raise ConfigError(
                f"the trace has a request to the model `{model}`; there are {', '.join(names)}"
            )
        found.append(request._replace(model=model))
    return found
