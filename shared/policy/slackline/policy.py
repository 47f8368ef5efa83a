"""Slackline's own policy. Every bound becomes an instant and a pace; one rule says who gives way
where time or KV is short; decodes run once in each period. docs/slackline.md has examples.

The view holds what is known of requests. The policy learns output lengths, the duration of
iterations, and how many drafts are accepted.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from shared.columns import least
from shared.policy import chunk
from shared.policy.chunk import Decoding, Rows
from shared.policy.fit import accept_what_fits
from shared.policy.lengths import OutputLengths
from shared.policy.seam import Admission, Bools, Choice, Declared, Floats, Observation, View
from shared.policy.slackline import bounds, iteration
from shared.policy.slackline.bounds import Decodes, Learned, Prefills
from shared.policy.slackline.drafts import Accepted, drafting, speed
from shared.policy.slackline.give_way import Passes, give_way, in_order, passes_of
from shared.policy.slackline.iteration import Order
from shared.policy.slackline.kv import Reserve, claimed, room_of
from shared.policy.slackline.prices import ONE, PriceList
from shared.policy.slackline.windows import Windows
from shared.policy.slos_serve.best_effort import make_room
from shared.routing.routings import RouterName
from shared.schemas import Offer
from shared.vocabulary import ServiceClass

STEP_WEIGHT = 0.005  # of one iteration in the mean duration of iterations with decodes
SPARING_S = 10.0  # for so long after a request gave way, best-effort ones get what they are owed
OWED = 0.01  # of the time, what best-effort requests get at least
NO_TIME = "it cannot be in time, or find KV in time, beside the requests taken before"


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    router: RouterName = "in_time"


class Now(NamedTuple):
    """The replica as one decision sees it."""

    view: View
    learned: Learned
    decodes: Decodes  # standard ones
    waiting: Prefills  # standard ones, then those offered

    def passes(self) -> Passes:
        fast = speed(self.view, self.decodes.tbt_s, self.learned.scale, len(self.decodes.rows))
        return passes_of(self.view, self.decodes, self.learned.prices, fast)


class Weighed(NamedTuple):
    """The standard prefills of one iteration."""

    queue: Prefills  # in the order in which they run
    relegated: Rows
    lost: bool  # not all can be in time


class Slackline:
    name = "slackline"
    declared = Declared()

    def __init__(self, settings: Settings) -> None:
        self._lengths, self._step_s, self._prices = OutputLengths(), 0.0, PriceList()
        self._windows, self._accepted, self._reserve = Windows(), Accepted(), Reserve()
        self._gave_way_unix_s = -math.inf  # when a request last gave way to others
        self._owed_since_unix_s = math.inf  # best-effort requests have had nothing since

    def admit(self, view: View, offers: Sequence[Offer]) -> Sequence[Admission]:
        """Every offer that fits is taken, unless it would have to give way itself. One that can
        wait is always taken: there is time for it to be attainable again.
        """
        answers, standard = list(accept_what_fits(view, offers)), ServiceClass.STANDARD
        asked = [n for n, offer in enumerate(offers) if offer.service_class is standard]
        asked = [n for n in asked if answers[n].accepted]
        if not asked:
            return answers
        offers = [bounds.as_offer_judged(offer) for offer in offers]
        if all(math.isinf(offers[n].next_due_unix_s) and offers[n].slo.ttlt_s for n in asked):
            return answers
        coming = [bounds.as_offer_judged(o) for o in view.promised if o.service_class is standard]
        coming += [offers[n] for n in asked]
        now = self._now(view, coming)
        last = now.waiting.taken(slice(-len(asked), None))
        room = None
        if all(offers[n].hops_left for n in asked):  # another replica may have KV
            room = room_of(now.view, now.decodes, self._step_s)
        lost = give_way(now.waiting, now.passes(), room)[-len(asked) :]
        lost |= self._crowded(now, now.waiting, len(coming))[-len(asked) :]
        lost &= ~last.waits
        alone = last.seconds + now.learned.prices.batch_s <= last.due_s
        for n, declined, in_time_alone in zip(asked, lost.tolist(), alone.tolist(), strict=True):
            if declined:
                answers[n] = Admission(False, reason=NO_TIME)
                if in_time_alone:  # another has given way to nobody
                    self._gave_way_unix_s = view.start_unix_s
        return answers

    def _crowded(self, now: Now, waiting: Prefills, new: int) -> Bools:
        """[new] the last of those that wait with which passes in the tightest pace, and of each
        decode as many tokens as its own pace asks, would take more than all of the time.
        """
        decodes = now.decodes
        context = now.view.top_tokens[decodes.rows] + decodes.output_tokens / 2
        decode_s = now.learned.prices.decoding_s(context)
        tbt_s = np.concatenate((decodes.tbt_s, waiting.tbt_s))
        pace_s = np.concatenate((decodes.pace_s, waiting.pace_s))
        rate = np.concatenate((decode_s, waiting.decode_s)) / pace_s
        paced, present = tbt_s < math.inf, len(tbt_s) - new
        least_s = least(pace_s[:present][paced[:present]])
        asked_s = np.where(paced[present:], pace_s[present:], math.inf)
        tightest_s = np.minimum(least_s, np.minimum.accumulate(asked_s))
        load = np.where(paced, rate, 0.0).cumsum()[present:]
        load += now.view.profile.batch_s(ONE) / tightest_s
        fast = speed(now.view, tightest_s, now.learned.scale, len(rate))
        crowded: Bools = (load > fast) & paced[present:]
        return crowded

    def plan(self, view: View) -> Sequence[Choice]:
        every, now = chunk.decoding(view), self._now(view)
        view = now.view
        weighed, decodes = self._weighed(now, every.victims), now.decodes
        queue = weighed.queue
        if len(queue.rows) and not np.count_nonzero(view.whole[queue.rows]):
            decodes = decodes.spending()
        if len(relegated := weighed.relegated):
            self._gave_way_unix_s = view.start_unix_s
        # a whole answer that is late already gives way, too
        if np.count_nonzero(late := view.last_due_unix_s[decodes.rows] < view.start_unix_s):
            relegated = np.concatenate((relegated, decodes.rows[late & view.whole[decodes.rows]]))
        queue = self._reserve.beginning(view, queue)
        every = make_room(view, every, queue.rows[: iteration.FIRST])
        if len(queue.rows):
            kept = iteration.kept_for_drafts(view)
            every, queue = claimed(view, every, queue, kept, relegated)
        choice = self._choice(now, decodes, every, queue)
        promoted = self._promoted(now, weighed, every.victims)
        if len(relegated) + len(promoted):
            away, back = view.slot[relegated].tolist(), view.slot[promoted].tolist()
            return [replace(choice, relegate=away, promote=back, repeats=1)]
        # what is right changes with each token, but where all are decodes
        alike = len(every.rows) == view.rows == len(choice.slots)
        return [choice if alike or choice.repeats == 1 else replace(choice, repeats=1)]

    def _choice(self, now: Now, decodes: Decodes, every: Decoding, queue: Prefills) -> Choice:
        view = now.view
        if len(every.rows) < view.rows:  # some are about to end, or lose their KV
            runs = np.zeros(view.rows, dtype=np.bool_)
            runs[every.rows] = True
            if np.count_nonzero(runs[decodes.rows]) < len(decodes.rows):
                decodes = decodes.taken(runs[decodes.rows])
        others = bool(np.count_nonzero(view.best_effort))
        calm, spare = view.start_unix_s - self._gave_way_unix_s >= SPARING_S, view.best_effort
        if others and not calm:  # where the last token judges, a late one may catch up
            spare = spare & (view.definition == bounds.LAST)
        order, choice = Order(view, decodes, every), None
        if others and self._owes(view):
            choice = iteration.best_effort_first(order, queue.rows)
        # beside prefills that find no KV decodes run as if none waited, so that they end
        if len(queue.rows) and iteration.stuck(view, every, queue):
            queue = queue.taken(slice(0))
        if choice is None and view.draft is not None:
            self._accepted.begin(view.accepted_shares)
            prices, scale = now.learned.prices, self._accepted.scale
            choice = drafting(order, queue.rows, spare, prices, scale, calm=calm)
        if choice is None:
            choice = iteration.iteration(order, queue, spare)
        if not others or iteration.has_best_effort(view, choice):
            self._owed_since_unix_s = math.inf
        return choice

    def _owes(self, view: View) -> bool:
        """Best-effort requests come first, once their share of the time pays for an iteration."""
        self._owed_since_unix_s = min(self._owed_since_unix_s, view.start_unix_s)
        return OWED * (view.start_unix_s - self._owed_since_unix_s) > self._step_s

    def _now(self, view: View, offers: Sequence[Offer] = ()) -> Now:
        """`offers` wait as well, behind the others."""
        view, prices = bounds.as_judged(view), self._prices.of(view.profile)
        learned = Learned(self._lengths, self._step_s, prices, self._accepted.scale)
        rows: Rows = (view.in_decode & view.standard).nonzero()[0]
        others: Rows = (~view.in_decode & view.standard).nonzero()[0]
        n, waits = len(rows), len(others) > 0
        facts = bounds.facts_of(view, np.concatenate((rows, others)), learned, offers)
        own = facts.taken(slice(n))
        decodes = bounds.decodes_of(view, rows, own, self._step_s, self._windows, waits=waits)
        waiting = bounds.NONE
        if offers:
            others = np.append(others, np.zeros(len(offers), dtype=np.intp))
        if len(others):
            own = facts.taken(slice(n, None))
            waiting = bounds.prefills_of(others, own, learned, view.block_tokens)
        return Now(view, learned, decodes, waiting)

    def _weighed(self, now: Now, victims: Rows) -> Weighed:
        """`victims` lose their KV, and wait for the next iteration."""
        view, own = now.view, now.waiting
        if len(victims):
            own = own.taken(~np.isin(own.rows, victims))
        if not len(own.rows):
            return Weighed(own, own.rows, False)
        passes = now.passes()
        gone = give_way(own, passes)
        keys: list[Rows | Floats | Bools]
        keys = [view.slot[own.rows], view.arrived_unix_s[own.rows], in_order(own)]
        if not np.count_nonzero(gone):
            return Weighed(own.taken(np.lexsort(keys)), own.rows[:0], False)
        # what can wait is weighed once more, by when it could last begin
        late = give_way(own._replace(due_s=own.hope_s), passes)
        leaves = gone & (~own.waits | late)
        # what gives way is last, the most important first
        order = np.lexsort([*keys, np.where(gone, -own.value, 0.0), gone])
        return Weighed(own.taken(order[~leaves[order]]), own.rows[leaves], True)

    def _promoted(self, now: Now, weighed: Weighed, victims: Rows) -> Rows:
        """The first best-effort prefill that can be in time, if nothing else is late for it."""
        view, none = now.view, now.waiting.rows[:0]
        if weighed.lost or not np.count_nonzero(view.best_effort):
            return none
        others = ~view.in_decode & view.best_effort
        others[victims] = False
        rows = iteration.by_importance(view, others.nonzero()[0])
        facts = bounds.facts_of(view, rows, now.learned)
        asks = bounds.prefills_of(rows, facts, now.learned, view.block_tokens)
        able = (asks.seconds + now.learned.prices.batch_s < asks.due_s).nonzero()[0][:1]
        if not len(able):
            return none
        first = asks.taken(able)
        both = now.waiting.beside(first)
        if give_way(both, now.passes()).any() or self._crowded(now, both, 1).any():
            return none
        return first.rows

    def observe(self, seen: Observation) -> None:
        if seen.shape.decodes:
            kept = (1 - STEP_WEIGHT) ** seen.iterations if self._step_s else 0.0
            self._step_s = kept * self._step_s + (1 - kept) * seen.exec_s
        self._accepted.observe(seen)
        for ended in seen.ended:
            self._lengths.observe(ended)
