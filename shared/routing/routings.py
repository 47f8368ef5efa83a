"""The named routings, each an order of replicas to ask; a policy's setting `router` picks one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from shared.routing import scorers
from shared.routing.filters import declined, never_declined
from shared.routing.pickers import BestFirst, BestInTurn, Rotation, TicketOrder
from shared.routing.pipeline import Picker, Pipeline, Scorer
from shared.schemas import Offer

RouterName = Literal["attainable", "in_time", "round_robin"]


class Parts(NamedTuple):
    scorers: Sequence[Scorer]
    picker: Callable[[], Picker]


PARTS: Mapping[RouterName, Parts] = {
    # Replicas with a free slot first, then those predicted to hold the SLO, then those with KV
    # room; among them the least backlog relative to the time left, then the least KV in use.
    "attainable": Parts(
        (
            scorers.free_slot,
            scorers.attainability,
            scorers.surplus,
            scorers.kv_room,
            scorers.backlog,
            scorers.kv_free,
        ),
        BestFirst,
    ),
    # The same without the KV, which the planner that is asked counts by what its replica has of the
    # prompt; others' time counts as well, and equal replicas are taken in turn.
    "in_time": Parts(
        (scorers.free_slot, scorers.attainability, scorers.surplus, scorers.delay), BestInTurn
    ),
    "round_robin": Parts((), Rotation),
}


def named(name: RouterName) -> Pipeline:
    parts = PARTS[name]
    return Pipeline(parts.picker(), scorers=parts.scorers)


def sequential() -> Pipeline:
    """SLOs-Serve (section 4.2): replicas in turn (section 6.2: "a one-shot round-robin
    dispatcher"). After a decline the next in turn is asked, up to the hop limit.
    """
    return Pipeline(Rotation(takes_turn=_new))


def one_offer() -> Pipeline:
    """Figure 14 of SLOs-Serve, without routing: replicas in turn, best-effort after one decline."""
    return Pipeline(Rotation(takes_turn=_new), filters=[never_declined])


def with_tickets(name: RouterName, high: str) -> Pipeline:
    """Ascendra's controller (sections 4 and 6.1): the routing `name` orders each of two pools."""
    parts = PARTS[name]
    return Pipeline(TicketOrder(high, parts.picker(), parts.picker()), scorers=parts.scorers)


def _new(offer: Offer) -> bool:
    return not declined(offer)
