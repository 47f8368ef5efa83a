"""The timeline of a request: where its time went, what happened, its first late token. Admission
and relegation add the record's events, the worker adds iterations (time_accounting.py).
"""

from collections.abc import Iterable, Sequence
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from shared.vocabulary import Count

NEIGHBOURS = 4  # named in an account; the others are summed up
MOST = 2**31 - 1  # the largest count
HAPPENINGS = 32  # kept in a timeline; beyond that, the middle gives way


class Cause(StrEnum):
    """A cause to which time goes. `nothing`: the request was on time, or nobody knows."""

    NOTHING = ""
    PLACING = "placing"  # looking for a replica: reading the request, its record, offers, the hold
    RELEGATED = "relegated"  # waiting as best-effort: in the pool, or while a replica ran others
    # between two replicas: the first was lost, drained, or gave it up; and computed again
    MOVING = "moving"
    QUEUE = "queue"  # held by a replica, before its first iteration there, while others computed
    PREFILL = "prefill"  # its own prefill
    BESIDE = "beside"  # prefills of others, in iterations that ran it as well
    DECODES = "decodes"  # decodes, its own included, in iterations that ran it
    DRAFTS = "drafts"  # the draft model, in iterations that ran it
    SAT_OUT = "sat_out"  # iterations that left it out after it had begun
    CONTROL = "control"  # between iterations: the engine waited for a plan, or was late


CAUSES = tuple(cause for cause in Cause if cause)
FIELDS = {cause: f"{cause.value}_s" for cause in CAUSES}


class Neighbour(Struct, frozen=True, array_like=True):
    """Requests of one tenant and tier whose prefills took `seconds`. No tenant: the rest."""

    tenant: str
    tier: str
    requests: Count
    seconds: float


class Account(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The seconds of a request's life by cause, from its arrival to `until_unix_s` (0: nothing is
    accounted). They add up to that time. An iteration's seconds are split by the planner's
    prediction into decodes, drafts and prefills, and among prefills by their tokens.
    """

    until_unix_s: float = 0.0
    placing_s: float = 0.0
    relegated_s: float = 0.0
    moving_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    beside_s: float = 0.0
    decodes_s: float = 0.0
    drafts_s: float = 0.0
    sat_out_s: float = 0.0
    control_s: float = 0.0
    # requests whose prefills ran while a replica held this one, those with most seconds first
    neighbours: tuple[Neighbour, ...] = ()

    def seconds(self, cause: Cause) -> float:
        spent_s: float = getattr(self, FIELDS[cause])
        return spent_s

    @property
    def total_s(self) -> float:
        return sum(self.seconds(cause) for cause in CAUSES)

    def spent(self, cause: Cause, arrived_unix_s: float, until_unix_s: float) -> "Account":
        """The account if all the time until `until_unix_s` went into this cause."""
        since = self.until_unix_s or arrived_unix_s
        until = max(since, until_unix_s)
        name = FIELDS[cause]
        return replace(self, until_unix_s=until, **{name: getattr(self, name) + until - since})

    def plus(self, other: "Account") -> "Account":
        """The account of both times, one after the other."""
        spent = {name: getattr(self, name) + getattr(other, name) for name in FIELDS.values()}
        return Account(
            until_unix_s=max(self.until_unix_s, other.until_unix_s),
            neighbours=merged((*self.neighbours, *other.neighbours)),
            **spent,
        )


def merged(neighbours: Iterable[Neighbour]) -> tuple[Neighbour, ...]:
    """One neighbour for each tenant and tier, those with most seconds first; the rest as one."""
    sums: dict[tuple[str, str], tuple[int, float]] = {}
    for tenant, tier, requests, seconds in map(_columns, neighbours):
        before = sums.get((tenant, tier), (0, 0.0))
        sums[tenant, tier] = (min(before[0] + requests, MOST), before[1] + seconds)
    others, of_others = sums.pop(("", ""), (0, 0.0))
    found = [Neighbour(*whose, *what) for whose, what in sums.items()]
    found.sort(key=lambda neighbour: (-neighbour.seconds, neighbour.tenant, neighbour.tier))
    for beyond in found[NEIGHBOURS:]:
        others = min(others + beyond.requests, MOST)
        of_others += beyond.seconds
    rest = [Neighbour("", "", others, of_others)] if others else []
    return (*found[:NEIGHBOURS], *rest)


def _columns(neighbour: Neighbour) -> tuple[str, str, int, float]:
    return neighbour.tenant, neighbour.tier, neighbour.requests, neighbour.seconds


class Happened(StrEnum):
    """The steps in a request's life that a timeline notes."""

    DECLINED = "declined"  # by a replica that was offered it
    HELD = "held"  # a replica has it
    BEGAN = "began"  # its first iteration on that replica
    FIRST_TOKEN = "first token"
    PREEMPTED = "preempted"  # its KV was dropped
    RELEGATED = "relegated"  # to best-effort on the replica that has it, or into the pool
    PROMOTED = "promoted"
    DRAWN = "drawn"  # taken out of the pool, for a replica
    LEFT = "left"  # it left its replica, to go on elsewhere


TOO_LATE = "its deadline could not be met there"  # why a policy relegates
WHY_MOST = 200  # characters of a reason


class Happening(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One step, with the replica that took it, and its reason."""

    at_unix_s: float
    what: Happened
    replica: str = ""
    why: str = ""
    # if relegated: the requests whose prefills the replicas had to compute first
    neighbours: tuple[Neighbour, ...] = ()


class Late(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The first token that was late: its number, from 1, and the account until it came."""

    token: Count
    due_unix_s: float
    came_unix_s: float
    account: Account


class RequestTimeline(Struct, frozen=True, kw_only=True, omit_defaults=True):
    account: Account = Account()
    happenings: tuple[Happening, ...] = ()
    left_out: Count = 0  # happenings that gave way
    late: Late | None = None  # None: every token so far was on time

    def waited(self, arrived_unix_s: float, until_unix_s: float) -> "RequestTimeline":
        """The timeline of a request that waited until then, for what its last step tells."""
        account = self.account.spent(self.waits_for, arrived_unix_s, until_unix_s)
        return replace(self, account=account)

    @property
    def waits_for(self) -> Cause:
        """The cause of time that passes while nothing happens and no iteration is reported."""
        for happening in reversed(self.happenings):
            cause = _waits_after(happening)
            if cause is not None:
                return cause
        return Cause.PLACING

    def then(self, attempt: Account) -> Account:
        """The account with that of the attempt which follows. If the request had its first token,
        and left its replica since, then its prefill is computed again, which is part of the move.
        """
        if self._moved:
            moving_s = attempt.moving_s + attempt.prefill_s
            attempt = replace(attempt, moving_s=moving_s, prefill_s=0.0)
        return self.account.plus(attempt)

    @property
    def _moved(self) -> bool:
        steps = (Happened.FIRST_TOKEN, Happened.LEFT)
        found = [each for each in self.happenings if each.what in steps]
        began = any(each.what is Happened.FIRST_TOKEN for each in found)
        return began and _waits_after(found[-1]) is Cause.MOVING

    def left(self, replica: str, why: str, at_unix_s: float) -> "RequestTimeline":
        """The timeline of a request that leaves a replica, to go on elsewhere."""
        step = Happening(at_unix_s=at_unix_s, what=Happened.LEFT, replica=replica, why=why)
        return self.noted(step)

    def noted(self, *happenings: Happening) -> "RequestTimeline":
        """The timeline with these steps at its end."""
        kept, left_out = bounded((*self.happenings, *happenings))
        return replace(self, happenings=kept, left_out=min(self.left_out + left_out, MOST))


def bounded(happenings: Sequence[Happening]) -> tuple[tuple[Happening, ...], int]:
    """At most HAPPENINGS of the steps, the first and the last ones, and how many were left out."""
    beyond = len(happenings) - HAPPENINGS
    if beyond <= 0:
        return tuple(happenings), 0
    half = HAPPENINGS // 2
    return (*happenings[:half], *happenings[half + beyond :]), beyond


def _waits_after(happening: Happening) -> Cause | None:
    """The cause of the time after this step; None if the step does not tell."""
    match happening.what:
        case Happened.HELD | Happened.BEGAN:
            return Cause.CONTROL
        case Happened.RELEGATED if not happening.replica:
            return Cause.RELEGATED
        case Happened.DRAWN:
            return Cause.PLACING
        case Happened.LEFT:
            return Cause.RELEGATED if happening.why == "relegated" else Cause.MOVING
    return None
