"""`slackline`: one policy for every load, without a constant to set. docs/slackline.md derives it.

Around this file: the instants at which tokens are due (due.py, token_windows.py), the work ahead
and its price (work_ahead.py, price.py), the requests that give way (forecast.py, given_up.py),
those too many for a pass (crowd.py), paces that cost too much (kept_pace.py, hurry.py), KV
(room.py, kv_in_time.py, claims.py), one iteration (iteration.py, token_order.py), the time that
best-effort requests are owed (owed.py), drafts (drafts.py, lasting.py, yields.py).
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from shared.columns import Ints
from shared.perf.shape import BatchShape
from shared.policy import chunk
from shared.policy.chunk import Rows
from shared.policy.fit import accept_what_fits
from shared.policy.lengths import OutputLengths
from shared.policy.seam import (
    DEFINITIONS,
    Admission,
    Bools,
    Choice,
    Declared,
    Floats,
    Observation,
    View,
)
from shared.policy.slackline.claims import claimed
from shared.policy.slackline.crowd import Decodes, asked_of, crowded, present_of
from shared.policy.slackline.drafting.drafts import (
    Cases,
    Learned,
    can_pay,
    drafting,
    need_drafts,
    some_need_drafts,
    speed,
)
from shared.policy.slackline.due import (
    Due,
    as_judged,
    as_offer_judged,
    can_wait,
    catches_up,
    due_of_offers,
    due_of_rows,
    eased,
    hope_unix_s,
    in_haste,
    is_whole,
    left_s,
    likely_unix_s,
    put_off_by_deadline,
    put_off_by_mean,
    sits_out_until_s,
    token_due_unix_s,
)
from shared.policy.slackline.forecast import Passes, Work, favoured, give_way, look_again
from shared.policy.slackline.given_up import GivenUp
from shared.policy.slackline.hurry import without_hurry
from shared.policy.slackline.iteration import (
    FIRST,
    best_effort_first,
    has_best_effort,
    iteration,
    kept_for_drafts,
    may_be_passed,
)
from shared.policy.slackline.kept_pace import Demand, counts, pace_of, too_tight
from shared.policy.slackline.kv_in_time import finds_no_kv
from shared.policy.slackline.owed import Owed
from shared.policy.slackline.price import PriceList, Prices
from shared.policy.slackline.room import Room
from shared.policy.slackline.token_order import Timing, standard_decodes
from shared.policy.slackline.token_windows import NextTokens, Windows
from shared.policy.slackline.work_ahead import passes_of, unhurried, work_of_offers, work_of_rows
from shared.policy.slos_serve.best_effort import make_room
from shared.routing.routings import RouterName
from shared.schemas import Offer
from shared.vocabulary import Definition, ServiceClass, Slo

_DEADLINE = DEFINITIONS.index(Definition.DEADLINE)
_TTLT = DEFINITIONS.index(Definition.TTLT)

# Weight of one iteration in the mean duration of iterations with decodes.
STEP_WEIGHT = 0.005
# The share of the time until a TTLT from which on the work before it counts as a burden, and the
# seconds by which each of its tokens then puts it back behind others ([qoserve] section 3.6).
BURDEN = 0.25
BEHIND_S = 0.008
# Requests that are no whole answers are expected for so long after the last one.
LATELY_S = 60.0
# For so long after a request gave way, best-effort requests beside standard ones get no more than
# they are owed, but for some that `ttlt` judges.
SPARING_S = 10.0
# An output may well be so many times as long as the mean.
LONG = 2.0
# Why an offer is declined.
NO_TIME = "it cannot be in time beside the requests taken before"
NO_KV = "its KV would not come free in time"


class Part(StrEnum):
    """The parts of the rule that an ablation leaves out."""

    DOOR = "door"  # offers that would give way are declined
    RELEGATION = "relegation"  # prefills that give way leave the standard class
    DUE_FIRST = "due_first"  # prefills run in the order in which they are due
    SIT_OUT = "sit_out"  # decodes that are not due sit out
    CROWD = "crowd"  # offers beyond what a pass has time for are declined
    IN_TIME = "in_time"  # iterations end where prefills are due, or run them alone
    ALONE = "alone"  # prefills run without any decode where they would be late beside them
    CATCH_UP = "catch_up"  # late first tokens are made up for where the last one judges
    EARNED = "earned"  # early tokens leave time for others
    UNHURRIED = "unhurried"  # passes for the sake of a TTLT leave time for prefills
    HURRY = "hurry"  # whole answers for which short iterations cost too much are let go
    SECOND_LOOK = "second_look"  # whole answers that give way are weighed again, with the mean
    EARLY = "early"  # more important prefills are to be done before they are due
    PUT_BACK = "put_back"  # where work is a burden, whole answers go back by each token
    GIVEN_UP = "given_up"  # so do others, once many whole answers were given up
    ROOM = "room"  # KV is left to urgent requests
    KV = "kv"  # offers that would find no KV in time are declined
    CLAIMS = "claims"  # less important requests give up their KV for more important prompts
    KEPT_PACE = "kept_pace"  # paces that cost more requests than they serve are given up
    SPARING = "sparing"  # while requests give way, early tokens are not spent on best-effort ones
    OWED = "owed"  # best-effort requests get their share of the time
    PROMOTION = "promotion"  # best-effort prefills that can be in time come back
    DRAFTS = "drafts"  # decodes draft
    NEED = "need"  # they do so where a pace needs it
    WORTH = "worth"  # they do so where it brings more tokens a second


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    router: RouterName = "in_time"
    without: Part | None = None  # for an ablation


class Weighed(NamedTuple):
    """The standard prefills of one iteration."""

    queue: Rows  # in the order in which they run
    relegated: Rows
    gone: Rows  # those that cannot all be in time
    token_due_s: Floats  # of the view's rows: seconds from the start
    put_off_s: Floats  # the same, or later where earned time may be spent
    latest_s: Floats  # of windows: the same, or later for prefills without any decode
    until_s: Floats  # of windows: the latest of all


class Slackline:
    """The policy. It learns output lengths, the duration of iterations, and how many drafts are
    accepted and how long they take; the view holds all else.
    """

    name = "slackline"
    declared = Declared()

    def __init__(self, settings: Settings) -> None:
        self._lengths = OutputLengths()
        self._step_s = 0.0
        self._prices = PriceList()
        self._drafts = Learned()
        self._room = Room()
        self._owed = Owed()
        self._windows = Windows()
        self._demand = Demand()
        self._given_up = GivenUp()
        self._gave_way_unix_s = -math.inf  # when a request last gave way to others
        self._parts = frozenset(Part) - {settings.without}
        self._paced_unix_s = -math.inf  # when there last was a standard request without a TTLT

    def admit(self, view: View, offers: Sequence[Offer]) -> Sequence[Admission]:
        """Every offer that fits is taken, unless it would have to give way itself. A request that
        can wait is always taken: there is time for it to be attainable again.
        """
        offers = [as_offer_judged(offer) for offer in offers]
        answers = list(accept_what_fits(view, offers))
        asked = [
            n
            for n, offer in enumerate(offers)
            if answers[n].accepted and offer.service_class is ServiceClass.STANDARD
        ]
        whole = sum(is_whole(offers[n]) for n in asked)
        self._given_up.came(whole, view.start_unix_s)
        if not asked or Part.DOOR not in self._parts:
            return answers
        view = self._judged(view)
        waits = [self._can_wait(offers[n].slo) for n in asked]
        if all(waits):
            self._demand.fade(view.start_unix_s)
            return answers
        prices = self._prices.of(view.profile)
        decodes, waiting = standard_decodes(view), _waiting(view)
        due = self._bounds(view)
        due = self._unhurried(view, due, decodes, waits=len(waiting) > 0)
        held = work_of_rows(view, due, waiting, prices)
        coming = [
            as_offer_judged(offer)
            for offer in view.promised
            if offer.service_class is ServiceClass.STANDARD
        ]
        coming += [offers[n] for n in asked]
        now = view.start_unix_s
        of_coming = due_of_offers(coming, now, self._lengths, self._step_s)
        new = work_of_offers(coming, of_coming, now, prices)
        alone = (new.seconds + prices.batch_s <= new.due_s)[-len(asked) :]
        self._see([offers[n] for n in asked], now, new, alone)
        latest_s = self._next_tokens(view, due).latest_s
        passes = self._passes(view, due, decodes, latest_s, prices)
        work = held.beside(new)
        lost = give_way(work, self._favoured(work), passes)[-len(asked) :]
        lost |= self._too_tight(view, decodes, [offers[n] for n in asked])
        no_kv = np.zeros(len(asked), dtype=np.bool_)
        if Part.KV in self._parts:
            no_kv = finds_no_kv(view, due, decodes, coming, new, self._step_s, asked=len(asked))
            lost |= no_kv
        if Part.CROWD in self._parts and not lost.all():
            present = present_of(view, due, decodes, waiting, held)
            more = asked_of(coming, new, held.seconds.sum())
            lost |= self._crowded(view, present, more, lost, self._speed(view, decodes, coming))
        columns = ((lost & ~np.array(waits)).tolist(), no_kv.tolist(), alone.tolist())
        for n, declined, without_kv, in_time_alone in zip(asked, *columns, strict=True):
            if declined:
                answers[n] = Admission(False, reason=NO_KV if without_kv else NO_TIME)
                if in_time_alone:  # another has given way to nobody
                    self._gave_way_unix_s = now
            elif counts(offers[n]):
                self._demand.taken(offers[n].importance, now)
        return answers

    def plan(self, view: View) -> Sequence[Choice]:
        view = self._judged(view)
        every = chunk.decoding(view)
        decodes, waiting = standard_decodes(view), _waiting(view)
        prices, bounds = self._prices.of(view.profile), self._bounds(view)
        due = self._unhurried(view, bounds, decodes, waits=len(waiting) > 0)
        paced = self._paced_lately(view)
        waiting = _without(view, waiting, every.victims)
        weighed = self._weighed(view, due, decodes, waiting, prices)
        if len(weighed.gone):
            bounds = self._without_hurry(view, bounds, decodes, weighed.gone, prices)
            before = due
            due = self._unhurried(view, bounds, decodes, waits=paced, late=paced)
            if due is not before:
                weighed = self._weighed(view, due, decodes, waiting, prices)
        if len(weighed.relegated):
            whole = int(np.count_nonzero(view.whole[weighed.relegated]))
            self._given_up.gave_up(whole, view.start_unix_s)
            self._gave_way_unix_s = view.start_unix_s
            gone = weighed.relegated[_counts(view)[weighed.relegated]]
            self._demand.taken(-float(view.importance[gone].sum()), view.start_unix_s)
        calm = view.start_unix_s - self._gave_way_unix_s >= SPARING_S
        spare = self._spare(view, calm)
        every, queue = make_room(view, every, weighed.queue[:FIRST]), weighed.queue
        if len(queue) and Part.CLAIMS in self._parts:
            kept = kept_for_drafts(view)
            every, queue = claimed(view, due, every, queue, weighed.relegated, prices, kept)
        timing = self._timing(view, due, weighed)
        others = bool(np.count_nonzero(view.best_effort))
        promoted = weighed.relegated[:0]
        if others and not len(weighed.gone) and Part.PROMOTION in self._parts:
            promoted = self._in_time_again(view, due, decodes, weighed.latest_s, prices)
        waits = len(queue) > 0
        first = others and self._owed.due(view.start_unix_s, self._step_s, waits=waits)
        first &= Part.OWED in self._parts
        self._drafts.accepted.begin(view.accepted_shares)
        choice = best_effort_first(view, timing, every, queue) if first else None
        if choice is None and view.draft is not None and Part.DRAFTS in self._parts:
            # beside prefills that find no KV decodes draft as if none waited, so that they end
            passed, kept = may_be_passed(view), kept_for_drafts(view)
            none_begins = chunk.none_finds_kv(view, every, queue, passed, kept_blocks=kept)
            order = queue[:0] if none_begins else queue
            cases = Cases(Part.NEED in self._parts, Part.WORTH in self._parts)
            choice = drafting(
                view, timing, every, order, spare, prices, self._drafts, cases, calm=calm
            )
        if choice is None:
            choice = iteration(view, timing, every, queue, spare)
        if not others or has_best_effort(view, choice):
            self._owed.served()
        moves = len(weighed.relegated) + len(promoted)
        if moves:
            choice = replace(
                choice,
                relegate=view.slot[weighed.relegated].tolist(),
                promote=view.slot[promoted].tolist(),
            )
        if choice.repeats == 1:
            return [choice]
        # what is right changes with each token, but where all are decodes and run without drafts
        alone = len(every.rows) == view.rows and not moves and choice.speculation is None
        alone &= len(choice.slots) == len(every.rows)
        alone = alone and not can_pay(view, every, self._drafts)
        return [choice if alone else replace(choice, repeats=1)]

    def _judged(self, view: View) -> View:
        """The view with the bounds that count; in an ablation of catching up as if deadlines judged
        what can.
        """
        view = as_judged(view)
        if Part.CATCH_UP in self._parts:
            return view
        return replace(view, definition=np.where(catches_up(view), _DEADLINE, view.definition))

    def _can_wait(self, slo: Slo) -> bool:
        return can_wait(slo) and (Part.CATCH_UP in self._parts or slo.ttlt_s is not None)

    def _bounds(self, view: View) -> Due:
        due = due_of_rows(view, self._lengths, self._step_s)
        return eased(view, due) if Part.EARNED in self._parts else due

    def _unhurried(
        self, view: View, due: Due, decodes: Rows, *, waits: bool, late: bool = False
    ) -> Due:
        """These bounds as `unhurried` leaves them; as they are in an ablation without it."""
        if Part.UNHURRIED not in self._parts:
            return due
        return unhurried(view, due, decodes, waits=waits, late=late)

    def _without_hurry(
        self, view: View, due: Due, decodes: Rows, gone: Rows, prices: Prices
    ) -> Due:
        """The same with `without_hurry`."""
        if not self._parts.issuperset((Part.UNHURRIED, Part.HURRY)):
            return due
        return without_hurry(view, due, decodes, gone, prices)

    def _favoured(self, work: Work) -> Work:
        return favoured(work) if Part.EARLY in self._parts else work

    def _crowded(
        self, view: View, present: Decodes, coming: Decodes, lost: Bools, faster: float
    ) -> Bools:
        """[asked] those that are too many for a pass, without those in `lost`: they are declined,
        or wait. `coming`: what is promised, then those asked. `faster`: a pass brings each so many
        tokens.
        """
        promised = len(coming.pace_s) - len(lost)
        asked = coming.taken(slice(promised, None)).taken(~lost)
        if promised:
            present = present.beside(coming.taken(slice(0, promised)))
        found = np.zeros(len(lost), dtype=np.bool_)
        found[~lost] = crowded(present, asked, view.profile, faster)
        return found

    def _speed(self, view: View, decodes: Rows, coming: Sequence[Offer]) -> float:
        """The tokens that a pass brings each decode: more than one where a pace needs drafts, of
        those that decode or that come.
        """
        if view.draft is None:
            return 1.0
        paces = [pace_of(offer) for offer in coming]
        tbt_s = np.array([pace.tbt_s for pace in paces])
        windows = np.array([pace.windows for pace in paces])
        some = self._some_need(view, decodes)
        some |= Part.NEED in self._parts and bool(need_drafts(view, tbt_s, windows).any())
        return self._brought(view, decodes) if some else 1.0

    def _some_need(self, view: View, decodes: Rows) -> bool:
        """Tells whether one of these decodes has a pace that needs drafts."""
        return Part.NEED in self._parts and some_need_drafts(view, decodes)

    def _brought(self, view: View, decodes: Rows) -> float:
        """The tokens that drafts bring each of these decodes in the time of one; 1 where an
        ablation has no drafts.
        """
        return speed(view, self._drafts, len(decodes)) if Part.DRAFTS in self._parts else 1.0

    def _see(self, offers: Sequence[Offer], now_unix_s: float, work: Work, alone: Bools) -> None:
        """Offers count for the demand, if they could be in time `alone`: no pace serves the others.
        `work` ends with theirs.
        """
        last = slice(len(work.due_s) - len(offers), None)
        prefill_s, decode_s = work.seconds[last], work.decode_s[last]
        if not alone.all():
            offers = [offer for offer, able in zip(offers, alone.tolist(), strict=True) if able]
            prefill_s, decode_s = prefill_s[alone], decode_s[alone]
        self._demand.offered(offers, now_unix_s, prefill_s, decode_s)

    def _too_tight(self, view: View, decodes: Rows, asked: Sequence[Offer]) -> Bools:
        """[asked] those with a pace that is not kept."""
        if self._demand.paces < 2 or Part.KEPT_PACE not in self._parts:
            return np.zeros(len(asked), dtype=np.bool_)
        pass_s = view.profile.batch_s(BatchShape(decodes=1))
        faster = self._brought(view, decodes)
        kept_s = self._demand.kept_s(view.start_unix_s, pass_s, faster, self._lengths)
        means = self._lengths.mean([offer.application for offer in asked]).tolist()
        paces = [pace_of(offer).eased(mean) for offer, mean in zip(asked, means, strict=True)]
        return too_tight(np.array([pace.tbt_s for pace in paces]), kept_s)

    def _spare(self, view: View, calm: bool) -> Bools:
        """[rows] the best-effort requests that run in the time which is left: all, and while others
        give way only those that may still be in time, since their outputs may be long.
        """
        if calm or Part.SPARING not in self._parts:
            return view.best_effort
        may_still: Bools = view.best_effort & (view.definition == _TTLT)
        rows = may_still.nonzero()[0]
        if len(rows):
            hope = hope_unix_s(view, rows, self._lengths, self._step_s, means=LONG)
            may_still[rows] = hope > view.start_unix_s
        return may_still

    def _paced_lately(self, view: View) -> bool:
        """Tells whether standard requests come that are no whole answers."""
        if np.count_nonzero(view.standard & ~view.whole):
            self._paced_unix_s = view.start_unix_s
        return view.start_unix_s - self._paced_unix_s < LATELY_S

    def _timing(self, view: View, due: Due, weighed: Weighed) -> Timing:
        prefill_due_s = due.prefill_unix_s - view.start_unix_s
        each_s = left_s(view, due)
        sit_out_s = sits_out_until_s(due, weighed.token_due_s, each_s)
        if Part.IN_TIME not in self._parts:
            prefill_due_s = np.full(view.rows, -math.inf)
        haste = in_haste(view)
        if np.count_nonzero(haste):
            sit_out_s[haste] = -math.inf
        if Part.SIT_OUT not in self._parts:
            sit_out_s = np.full(view.rows, -math.inf)
        latest_s = np.maximum(weighed.put_off_s, weighed.latest_s)
        if Part.ALONE not in self._parts:
            latest_s = np.full(view.rows, -math.inf)
        until_s = weighed.until_s
        return Timing(
            prefill_due_s, sit_out_s, weighed.put_off_s, latest_s, due.pace_s, until_s, each_s
        )

    def _weighed(self, view: View, due: Due, decodes: Rows, queue: Rows, prices: Prices) -> Weighed:
        """`queue`: the standard prefills that may run."""
        token_due_s, latest_s, until_s = self._next_tokens(view, due)
        if Part.EARNED in self._parts:
            by_deadlines = not self._some_need(view, decodes)
            token_due_s = put_off_by_mean(view, token_due_s, by_deadlines=by_deadlines)
        if not len(queue):
            put_off_s = token_due_s
            if Part.EARNED in self._parts:
                put_off_s = put_off_by_deadline(view, token_due_s)
            return Weighed(queue, queue, queue, token_due_s, put_off_s, latest_s, until_s)
        work = work_of_rows(view, due, queue, prices)
        early = self._favoured(work)
        passes = self._passes(view, due, decodes, latest_s, prices)
        gone = give_way(work, early, passes)
        whole = view.whole[queue]
        again = gone & whole
        if np.count_nonzero(again) and Part.SECOND_LOOK in self._parts:
            likely = likely_unix_s(view, queue[again], self._lengths, self._step_s)
            later_s = np.maximum(work.due_s[again], likely - view.start_unix_s)
            gone = look_again(work, gone, again, later_s, passes)
            due_s = early.due_s.copy()
            due_s[again] = np.where(gone[again], due_s[again], later_s)
            early = early._replace(due_s=due_s)
        lost, giving_way = bool(np.count_nonzero(gone)), queue[gone]
        relegated, hopeful = queue[:0], np.zeros(len(queue), dtype=np.bool_)
        if lost and Part.RELEGATION in self._parts:
            hope = hope_unix_s(view, queue, self._lengths, self._step_s)
            no_hope = _no_hope(view, hope, queue, work, prices)
            relegated, hopeful = queue[gone & no_hope], gone & ~no_hope
        work = early
        put_off_s = token_due_s
        if Part.EARNED in self._parts:
            burdened = _burdened(whole, work)
            if burdened or not np.count_nonzero(whole):
                put_off_s = put_off_by_deadline(view, token_due_s)
            if burdened and Part.PUT_BACK in self._parts:
                paced = Part.GIVEN_UP in self._parts and self._given_up.many(view.start_unix_s)
                work = work._replace(due_s=_put_back(view, due, queue, work, paced=paced))
        if Part.DUE_FIRST not in self._parts:
            work = work._replace(due_s=view.arrived_unix_s[queue] - view.start_unix_s)
        elif np.count_nonzero(hopeful):
            # the shortest first, so that the fewest have to catch up
            quick = hopeful & ~whole
            work = work._replace(due_s=np.where(quick, work.seconds, work.due_s))
        keys = (view.slot[queue], view.arrived_unix_s[queue], work.due_s)
        order = np.lexsort((*keys, *_turns(work.value, gone, hopeful)) if lost else keys)
        queue = _without(view, queue[order], relegated)
        if Part.ROOM in self._parts:
            due_s = due.prefill_unix_s[queue] - view.start_unix_s
            queue = self._room.beginning(view, queue, due_s)
        return Weighed(queue, relegated, giving_way, token_due_s, put_off_s, latest_s, until_s)

    def _passes(
        self, view: View, due: Due, decodes: Rows, latest_s: Floats, prices: Prices
    ) -> Passes:
        """The passes of the decodes: fewer where all draft, since a pace needs it."""
        needed = self._some_need(view, decodes)
        faster = self._brought(view, decodes) if needed else 1.0
        return passes_of(view, due, decodes, latest_s, prices, faster)

    def _next_tokens(self, view: View, due: Due) -> NextTokens:
        """[rows] the instants at which the next token of each decode is due."""
        token_due_s = token_due_unix_s(view, due) - view.start_unix_s
        if Part.EARNED not in self._parts:
            return NextTokens(token_due_s, token_due_s, token_due_s)
        return self._windows.next_tokens(view, token_due_s, self._step_s)

    def _in_time_again(
        self, view: View, due: Due, decodes: Rows, latest_s: Floats, prices: Prices
    ) -> Rows:
        """The first best-effort prefill that can be in time, if nothing else is late for it."""
        rows: Rows = (~view.in_decode & view.best_effort).nonzero()[0]
        if not len(rows):
            return rows
        work = work_of_rows(view, due, rows, prices)
        rows = rows[work.seconds + prices.batch_s < work.due_s]
        if not len(rows):
            return rows
        order = np.lexsort((view.slot[rows], view.arrived_unix_s[rows], -view.importance[rows]))
        first: Rows = rows[order[:1]]
        together = np.concatenate((_waiting(view), first))
        passes = self._passes(view, due, decodes, latest_s, prices)
        work = work_of_rows(view, due, together, prices)
        gone = give_way(work, self._favoured(work), passes)
        return first[:0] if gone.any() else first

    def observe(self, seen: Observation) -> None:
        if seen.shape.decodes:
            kept = (1 - STEP_WEIGHT) ** seen.iterations if self._step_s else 0.0
            self._step_s = kept * self._step_s + (1 - kept) * seen.exec_s
        self._drafts.observe(seen)
        for ended in seen.ended:
            self._lengths.observe(ended)


def _without(view: View, rows: Rows, gone: Rows) -> Rows:
    """These rows but those in `gone`."""
    if not len(gone):
        return rows
    others = np.ones(view.rows, dtype=np.bool_)
    others[gone] = False
    return rows[others[rows]]


def _waiting(view: View) -> Rows:
    """The standard prefills."""
    rows: Rows = (~view.in_decode & view.standard).nonzero()[0]
    return rows


def _no_hope(view: View, hope: Floats, queue: Rows, work: Work, prices: Prices) -> Bools:
    """[queue] those that leave the standard class if they must give way: all that cannot wait, and
    of those that can the ones that could not be in time even alone. `hope`: as `hope_unix_s` has
    it.
    """
    hopeless: Bools = work.seconds + prices.batch_s > hope - view.start_unix_s
    return ~(view.whole | catches_up(view))[queue] | hopeless


def _counts(view: View) -> Bools:
    """[rows] as `counts` has it: those with a TTFT or a pace that cannot wait."""
    dated: Bools = np.isfinite(view.next_due_unix_s) | np.isfinite(view.tightest_tbt_s)
    return dated & ~view.whole & ~catches_up(view)


def _burdened(whole: Bools, work: Work) -> bool:
    """The work before the TTLT of some whole answer takes up a good share of the time until then.
    `whole`: which prefills are of one.
    """
    if not np.count_nonzero(whole):
        return False
    # all that waits is none; half, so that no rounding counts
    if work.seconds.sum() < BURDEN / 2 * work.due_s[whole].min():
        return False
    order = work.due_s.argsort(kind="stable")
    share = work.seconds[order].cumsum() / np.maximum(work.due_s[order], 1e-6)
    return float(share[whole[order]].max()) >= BURDEN


def _turns(value: Floats, gone: Bools, hopeful: Bools) -> tuple[Floats | Ints | Bools, ...]:
    """[queue] the keys of the order, the last one first. Those in `gone` give way and run last, the
    most important first. A whole answer in `hopeful` may still be in time: it runs before those
    that are less important, even if these would be in time.
    """
    more = value > value.min()
    if not np.count_nonzero(more):
        return (gone,)
    more &= hopeful
    most = value[more].max(initial=-math.inf)
    # in time; hopeful and more important than some; less important than these; gone
    turns: Ints = np.where(more, 1, np.where(gone, 3, np.where(value < most, 2, 0)))
    return np.where(gone, -value, 0.0), turns


def _put_back(view: View, due: Due, queue: Rows, work: Work, *, paced: bool) -> Floats:
    """[queue] when each is due, for the order: a whole answer later by each token. `paced`: of the
    others the least important, too, by each token of the prompt.
    """
    whole = view.whole[queue]
    left = view.target_tokens[queue] - view.computed_tokens[queue]
    tokens = np.where(whole, left + due.output_tokens[queue], 0.0)
    if paced:
        tokens = np.where(whole | (work.value > work.value.min()), tokens, left)
    return work.due_s + BEHIND_S * tokens
