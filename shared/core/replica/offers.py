"""The offers to one replica that have no final answer yet, and the declines that stay."""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shared.core.replica.events import Answer, SendHold
from shared.core.replica.slots import Attempt, Slots, attempt_of
from shared.policy.seam import Admission
from shared.schemas import (
    Hold,
    Offer,
    OfferAccepted,
    OfferAnswer,
    OfferDeclined,
    OfferInDoubt,
    OfferNotReady,
)

Declined = OfferDeclined | OfferNotReady | OfferInDoubt
Unfit = Callable[[Offer], Declined | None]  # an answer for which no policy need be asked

DECLINES = 4096  # remembered; a second copy of an offer comes within seconds, if ever


class Gathered(NamedTuple):
    """An offer that waits for others, to be decided with them."""

    offer: Offer
    copies: int  # it came so often, and is answered as often


@dataclass(slots=True)
class Reservation:
    """An offer that was accepted; its worker has not answered the hold."""

    offer: Offer
    slot: int
    copies: int
    over: bool = False  # an ack reported its end before the answer to its hold came


class OfferDesk:
    """Offers come in, answers and holds go out; the policy decides between."""

    def __init__(self, slots: Slots) -> None:
        self.reserved: dict[int, Reservation] = {}  # by slot
        self.decide_unix_s = math.inf  # when the gathered offers are answered at the latest
        self._slots = slots
        self._gathered: dict[Attempt, Gathered] = {}
        self._declined: OrderedDict[Attempt, OfferAnswer] = OrderedDict()

    @property
    def gathered(self) -> int:
        return len(self._gathered)

    @property
    def asked(self) -> list[Offer]:
        """The offers that the next decision answers."""
        return [gathered.offer for gathered in self._gathered.values()]

    @property
    def promised(self) -> list[Offer]:
        return [reservation.offer for reservation in self.reserved.values()]

    def receive(self, offers: Sequence[Offer], unfit: Unfit) -> list[Answer]:
        """Gather the offers that a policy must decide; answer the others. A copy of an offer that
        is reserved gets its answer with it.
        """
        answers: list[Answer] = []
        for offer in offers:
            declined, slot = self._declined.get(attempt_of(offer)), self._slots.of(offer)
            if declined is not None:
                answers.append(Answer(offer.key, offer.attempt, declined))
            elif slot is not None and slot in self.reserved:
                self.reserved[slot].copies += 1
            elif slot is not None:
                answers.append(Answer(offer.key, offer.attempt, OfferAccepted(reason="held")))
            elif (answer := unfit(offer)) is not None:
                answers += self.decline(offer, answer)
            else:
                earlier = self._gathered.get(attempt_of(offer))
                copies = 1 if earlier is None else earlier.copies + 1
                self._gathered[attempt_of(offer)] = Gathered(offer, copies)
        return answers

    def decide(
        self, admissions: Sequence[Admission], *, epoch: int, sync: int
    ) -> list[Answer | SendHold]:
        """Answer all that were asked, in their order; an accepted one goes to the worker first."""
        actions: list[Answer | SendHold] = []
        gathered, self._gathered = list(self._gathered.values()), {}
        self.decide_unix_s = math.inf
        for (offer, copies), admission in zip(gathered, admissions, strict=True):
            if not admission.accepted:
                answer = OfferDeclined(reason=admission.reason, earliest_s=admission.earliest_s)
                actions += self.decline(offer, answer, copies)
            elif (slot := self._slots.take(offer)) is None:
                actions += self.decline(offer, OfferDeclined(reason="no free slot"), copies)
            else:
                self.reserved[slot] = Reservation(offer, slot, copies)
                hold = Hold(
                    epoch=epoch,
                    sync=sync,
                    slot=slot,
                    key=offer.key,
                    attempt=offer.attempt,
                    body_key=offer.body_key,
                )
                actions.append(SendHold(hold))
        return actions

    def decline(self, offer: Offer, answer: Declined, copies: int = 1) -> list[Answer]:
        """Once declined, an attempt stays declined: its admission has gone on, and would not learn
        that a second copy of the offer was accepted.
        """
        self._declined[attempt_of(offer)] = answer
        if len(self._declined) > DECLINES:
            self._declined.popitem(last=False)
        return [Answer(offer.key, offer.attempt, answer)] * copies
