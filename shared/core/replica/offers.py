"""The offers to one replica, from their arrival to the answer: those that are gathered, those that
have a slot while the worker is asked, and those that were declined and stay so.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, assert_never

from msgspec.structs import replace

from shared.core.prefixes.fetching import Fetching
from shared.core.prefixes.kept import KeptPrefixes
from shared.core.prefixes.sessions import Sessions
from shared.core.replica.digest import decodes_of
from shared.core.replica.events import Answer, HoldDone, SendHold, WorkerGone
from shared.core.replica.fairness import Fairness
from shared.core.replica.request_table import RequestTable
from shared.core.replica.slots import Attempt, Slots, attempt_of
from shared.perf.iteration_time import Profile
from shared.policy.seam import Admission
from shared.schemas import (
    Announce,
    Hold,
    Offer,
    OfferAccepted,
    OfferAnswer,
    OfferDeclined,
    OfferInDoubt,
    OfferNotReady,
    ResyncEntry,
)
from shared.vocabulary import Slo

Declined = OfferDeclined | OfferNotReady | OfferInDoubt
# (promised offers, offers asked about) -> the policy's answers to the latter
Admit = Callable[[Sequence[Offer], Sequence[Offer]], Sequence[Admission]]

DECLINES = 4096  # are remembered; a second copy of an offer comes within seconds, if ever


class Gathered(NamedTuple):
    """An offer that waits to be decided together with others."""

    offer: Offer
    copies: int  # how often the offer came; each copy gets an answer


@dataclass(slots=True)
class Reservation:
    """An offer that was accepted; its worker has not answered the hold."""

    offer: Offer
    slot: int
    copies: int
    over: bool = False  # an ack reported its end before the answer to its hold came


class Held(NamedTuple):
    """The answers to send once a hold is answered. `begins`: the worker holds the request from now
    on. `doubt`: why nobody knows what the worker has; empty if it is known.
    """

    answers: list[Answer]
    begins: ResyncEntry | None = None
    doubt: str = ""


class OfferDesk:
    """The desk of one replica: offers come in, the policy decides, holds and answers go out."""

    def __init__(self, profile: Profile) -> None:
        self._sessions, self.fetching = Sessions(profile), Fetching(profile)
        self.reserved: dict[int, Reservation] = {}  # by slot
        self.slots, self.fairness = Slots(), Fairness()
        self._gathered: dict[Attempt, Gathered] = {}
        self._declined: OrderedDict[Attempt, OfferAnswer] = OrderedDict()

    @property
    def idle(self) -> bool:
        return not self.undecided and not self.reserved

    @property
    def undecided(self) -> bool:
        """True if received offers wait for `decide`."""
        return len(self._gathered) > 0

    @property
    def promised(self) -> list[Offer]:
        return [reservation.offer for reservation in self.reserved.values()]

    def begin(
        self,
        facts: Announce,
        kept: KeptPrefixes,
        entries: Sequence[ResyncEntry],
        before: RequestTable,
        table: RequestTable,
    ) -> list[ResyncEntry]:
        """Begin after a resync: the worker holds these entries. `before`: the former table. Returns
        the entries that get a row: those whose HoldDone is not on the way.
        """
        self.fetching.synced(facts, kept, partial(decodes_of, table))
        for offer in before.offers.values():
            self.fairness.leave(offer)
        self.slots.begin(facts.max_slots, {*self.reserved, *(entry.slot for entry in entries)})
        for reservation in self.reserved.values():
            self.slots.assign(reservation.offer, reservation.slot)
        answering = {(*attempt_of(r.offer), r.slot) for r in self.reserved.values()}
        begun = (e for e in entries if (*attempt_of(e.offer), e.slot) not in answering)
        return [replace(entry, offer=as_served(entry.offer)) for entry in begun]

    def receive(
        self,
        offers: Sequence[Offer],
        facts: Announce | None,
        table: RequestTable,
        now_unix_s: float,
    ) -> list[Answer]:
        """Gather the offers that a policy must decide; answer the others. A copy of a reserved
        offer gets its answer with the first. `facts`: None while the worker's state is not known.
        """
        answers: list[Answer] = []
        for offer in map(as_served, offers):
            self._sessions.arrives(offer, now_unix_s)
            declined, slot = self._declined.get(attempt_of(offer)), self.slots.of(offer)
            if declined is not None:
                answers.append(Answer(offer.key, offer.attempt, declined))
            elif slot is not None and slot in self.reserved:
                self.reserved[slot].copies += 1
            elif slot is not None:
                answers.append(Answer(offer.key, offer.attempt, OfferAccepted(reason="held")))
            elif (answer := _unfit(offer, facts, table)) is not None:
                answers += self._decline(offer, answer)
            else:
                earlier = self._gathered.get(attempt_of(offer))
                copies = 1 if earlier is None else earlier.copies + 1
                self._gathered[attempt_of(offer)] = Gathered(offer, copies)
        return answers

    def decide(
        self, admit: Admit, table: RequestTable, now_unix_s: float, *, epoch: int, sync: int
    ) -> list[Answer | SendHold]:
        """Answer all gathered offers, in their order; an accepted one first becomes a hold. The
        last slots are for tenants that have less than their share.
        """
        actions: list[Answer | SendHold] = []
        gathered, self._gathered = list(self._gathered.values()), {}
        asked = [offer for offer, _ in gathered]
        for offer in asked:
            self.fairness.enter(offer, table, now_unix_s)
        free, kv_tokens = self.slots.free, table.kv_blocks * table.block_tokens
        for (offer, copies), admission in zip(gathered, admit(self.promised, asked), strict=True):
            if not admission.accepted:
                answer = OfferDeclined(reason=admission.reason, earliest_s=admission.earliest_s)
                actions += self._decline(offer, answer, copies)
            elif self.fairness.crowds(offer, table, free):
                answer = OfferDeclined(reason="its tenant has its share of the slots")
                actions += self._decline(offer, answer, copies)
            elif (slot := self.slots.take(offer)) is None:
                actions += self._decline(offer, OfferDeclined(reason="no free slot"), copies)
            else:
                free -= 1
                self.reserved[slot] = Reservation(offer, slot, copies)
                hold = Hold(
                    epoch=epoch,
                    sync=sync,
                    slot=slot,
                    key=offer.key,
                    attempt=offer.attempt,
                    body_key=offer.body_key,
                    keep_s=self._sessions.keep_s(offer, kv_tokens),
                    fetch_s=self.fetching.wait_s(offer),
                )
                actions.append(SendHold(hold))
        for offer in asked:
            if self.slots.of(offer) is None:
                self.fairness.leave(offer)
        return actions

    def held(self, done: HoldDone, *, synced: bool) -> Held | None:
        """The worker has answered a hold. None if nobody waits for that answer."""
        reservation = self.reserved.pop(done.slot, None)
        if reservation is None:
            return None
        offer, copies = reservation.offer, reservation.copies
        match done.answer:
            case OfferAccepted(kv_tokens=brought):
                answers = [Answer(offer.key, offer.attempt, OfferAccepted())] * copies
                if not reservation.over:
                    made = offer.generated_tokens
                    entry = ResyncEntry(
                        slot=done.slot,
                        offer=replace(offer, kv_tokens=brought),
                        computed_tokens=0,
                        generated_tokens=made,
                    )
                    return Held(answers, entry)
            case OfferInDoubt(reason=reason):
                self._forget(offer)
                answers = self._decline(offer, OfferInDoubt(reason=reason), copies)
                return Held(answers, doubt=f"hold of slot {done.slot}: {reason}")
            case OfferDeclined(reason=reason):
                answers = self._decline(offer, OfferDeclined(reason=reason), copies)
            case WorkerGone():
                answer = OfferNotReady(reason="the worker is gone")
                answers = self._decline(offer, answer, copies)
            case _:
                assert_never(done.answer)
        self._forget(offer)
        if synced:
            self.slots.give_back(done.slot)
        return Held(answers)

    def leave(
        self,
        slot: int,
        offer: Offer,
        at_unix_s: float,
        *,
        last_seq: int,
        prompt_tokens: int,
        output_tokens: int,
    ) -> None:
        """A request left, with these tokens computed; plans up to `last_seq` may name its slot."""
        self._sessions.ended(offer, at_unix_s)
        self.fairness.leave(offer, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        self.slots.forget(offer)
        self.slots.retire(slot, last_seq)

    def _forget(self, offer: Offer) -> None:
        self.slots.forget(offer)
        self.fairness.leave(offer)

    def _decline(self, offer: Offer, answer: Declined, copies: int = 1) -> list[Answer]:
        """The answers that decline an offer. The attempt stays declined: its admission has gone on,
        and would not learn that a second copy of the offer was accepted.
        """
        self._declined[attempt_of(offer)] = answer
        if len(self._declined) > DECLINES:
            self._declined.popitem(last=False)
        return [Answer(offer.key, offer.attempt, answer)] * copies


def as_served(offer: Offer) -> Offer:
    """The part of a request that is served here: one that goes on elsewhere owes its first token
    and no pace. Without a TTFT it counts whole: its prompt is due so long before its last token.
    """
    if offer.then is None or offer.slo.ttft_s is None:
        return offer
    most = min(offer.max_tokens, offer.generated_tokens + 1)
    return replace(offer, max_tokens=most, slo=Slo(ttft_s=offer.slo.ttft_s))


def _unfit(offer: Offer, facts: Announce | None, table: RequestTable) -> Declined | None:
    """The reason to decline an offer without asking the policy; None if there is none."""
    known_tokens = offer.prompt_tokens + offer.generated_tokens
    if facts is None or facts.draining:
        return OfferNotReady(reason="not ready")
    if offer.model not in ("", facts.model):
        return OfferDeclined(reason="it serves another model")
    if known_tokens >= facts.context_tokens:
        return OfferDeclined(reason="prompt exceeds the context")
    if offer.generated_tokens >= offer.max_tokens:
        return OfferDeclined(reason="nothing is left to be made")
    if -(-(known_tokens + 1) // table.block_tokens) > table.kv_blocks:
        return OfferDeclined(reason="prompt exceeds the KV cache")
    return None
