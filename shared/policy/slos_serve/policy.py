"""SLOs-Serve (arXiv 2504.08784): the policy takes only requests whose SLO it can keep, and then
keeps it. The others are best-effort.

Around this file: the demands of requests (demand.py), PB* (budget.py), the dynamic programme of
admission (programme.py), batches (batch.py) and their best-effort part (best_effort.py), draft
lengths and batches with drafts (draft_length.py, drafted.py), sequential routing (shared/routing/).

Where this differs from the paper:
- *When it plans* (Algorithm 1): offers are decided as they come, since one that waited for others
  would only have less time. So few come together, and importance would have no effect. Hence where
  not all fit, the least important requests whose prefill has not begun are chosen among anew: they
  give their place to more important ones if that is worth more, and become best-effort.
- Batches are planned when the planner asks; a horizon ends with an arrival or an end.
- *The loss at a deadline*: a batch may end at a deadline (batch.py). So of the batch in which a
  deadline lies only the time of its decodes is lost, not all of it. Elsewhere PB* is linear in
  time.
- *Lengths of drafts* are fixed for one admission from the decodes there are and those that may
  come, not solved anew for each n. They make windows of 10 tokens come in time, not their mean. The
  draft model's reading is paid for. While nothing is to be prefilled all decodes draft
  (draft_length.py).
- *Many new requests*: EXACT_NEW at a time, in order.
- *A running request whose deadline is lost* stays standard: the paper has no way down after
  admission. It does not keep other requests out.
- *Memory*: best-effort requests count as free, since they give way.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from msgspec import Struct

from shared.perf.draft import Draft
from shared.perf.shape import BatchShape
from shared.policy.chunk import Rows
from shared.policy.fit import accept_what_fits
from shared.policy.seam import Admission, Bools, Choice, Declared, Floats, Observation, Phase, View
from shared.policy.slos_serve import demand
from shared.policy.slos_serve.batch import MARGIN_S, Standing, batches, prefill_first
from shared.policy.slos_serve.budget import PrefillRate, tier_along, tiers_of
from shared.policy.slos_serve.demand import FAR_S, Demands, Lengths, PromptPrices, TightestOffered
from shared.policy.slos_serve.draft_length import (
    Acc,
    Acceptance,
    best_lengths,
    expected_tokens,
    fastest,
    sure_tokens,
    token_s,
)
from shared.policy.slos_serve.draft_length import Lengths as DraftLengths
from shared.policy.slos_serve.drafted import Drafting, speculating, tightened
from shared.policy.slos_serve.programme import Counts, Problem, choose, eased
from shared.routing.pipeline import Router
from shared.routing.routings import one_offer, sequential
from shared.schemas import Offer
from shared.vocabulary import ServiceClass

# Section 3.2.1: "zero to ten new requests" are typical. With more the table may grow too large.
EXACT_NEW = 10
# Ours: appendix D is solved anew when the mean context has moved by a step, or the profile's
# seconds for so many tokens by 0.1 ms.
CONTEXT_STEP = 64
PROBE_TOKENS = 512


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings. `router`, `speculate` and `best_effort` are the ablations of figure 14; all
    three off is its baseline.

    `speculate` matters where there is a draft model. `windows` is described above. `paper` makes
    batches as long as the mean of a window allows, and uses appendix D even while nothing is to be
    prefilled.
    """

    router: Literal["sequential", "round_robin"] = "sequential"
    speculate: Literal["windows", "paper", "never"] = "windows"
    # burst resilience; without it every request is taken, and prefills go first
    best_effort: bool = True


def routing(settings: Settings) -> Router:
    """Section 4.2, or the plain dispatcher that figure 14 compares it with."""
    return sequential() if settings.router == "sequential" else one_offer()


class SlosServe:
    """The policy. It learns output lengths and draft acceptance; the view holds all else."""

    name = "slos_serve"
    declared = Declared()

    def __init__(self, settings: Settings) -> None:
        self._set = settings
        self._lengths = Lengths()
        self._prices = PromptPrices()
        self._acceptance = Acceptance()
        self._tightest = TightestOffered()
        # the newest solution of appendix D, and the counts it is for
        self._solved: tuple[object, DraftLengths] | None = None
        self._give_way: set[int] = set()  # slots whose place went to more important requests

    # ------------------------------------------------------------ admission (section 3)

    def admit(self, view: View, offers: Sequence[Offer]) -> Sequence[Admission]:
        answers = list(accept_what_fits(view, offers))
        if not self._set.best_effort:
            return answers
        asked = [
            n
            for n, offer in enumerate(offers)
            if answers[n].accepted and offer.service_class is ServiceClass.STANDARD
        ]
        if not asked:
            return answers
        promised = [each for each in view.promised if each.service_class is ServiceClass.STANDARD]
        for first in range(0, len(asked), EXACT_NEW):
            some = asked[first : first + EXACT_NEW]
            served, backlog_s = self._served(view, promised, [offers[n] for n in some])
            for n, taken in zip(some, served, strict=True):
                if taken:
                    promised.append(offers[n])
                    continue
                answers[n] = Admission(
                    False,
                    earliest_s=backlog_s,
                    reason="its SLO cannot be kept beside those of the requests taken before",
                )
        return answers

    def _served(
        self, view: View, promised: Sequence[Offer], offers: Sequence[Offer]
    ) -> tuple[Sequence[bool], float | None]:
        """[offers] True for each offer that is taken; and the seconds until the present prefills
        can have ended, None where there is no time for any. Notes who gives way.
        """
        staying = view.standard & ~np.isin(view.slot, list(self._give_way))
        rows = staying.nonzero()[0]
        held = demand.of_rows(view, rows, self._lengths, self._prices)
        everyone = held.beside(
            demand.of_offers(view, [*promised, *offers], self._lengths, self._prices)
        )
        first_new = len(everyone.value) - len(offers)
        new = np.arange(len(everyone.value)) >= first_new
        self._tightest.offered(float(everyone.tpot_s[new].min()), view.start_unix_s)
        decodes = everyone.prefill_tokens == 0
        tiers = tiers_of(everyone.tpot_s)
        tier = tier_along(everyone.tpot_s, tiers)
        counts = tuple(np.bincount(tier[decodes], minlength=len(tiers)).tolist())
        most = np.bincount(tier, minlength=len(tiers)).tolist()
        rate = self._rate(view, everyone, tiers, most)
        items = (~decodes).nonzero()[0]
        batch_s = float((everyone.tpot_s[decodes] if decodes.any() else everyone.tpot_s).min())
        due_s = everyone.due_unix_s[items] - view.start_unix_s
        usable_s = _usable_s(view, due_s, batch_s)
        order = np.argsort(usable_s, kind="stable")
        items = items[order]

        def among(free: Bools) -> Bools:
            """[everyone] True for who is served if the programme may choose among these."""
            problem = eased(
                Problem(
                    due_s=usable_s[order],
                    prefill_tokens=everyone.prefill_tokens[items],
                    blocks=everyone.blocks[items],
                    value=everyone.value[items],
                    tier=tier[items],
                    new=free[items],
                    decoding=counts,
                    free_blocks=view.kv_blocks - int(everyone.blocks[~free].sum()),
                    rate=rate,
                ),
                FAR_S,
            )
            served = ~free
            served[items[free[items]]] = choose(problem)[problem.new]  # forced items alone moved
            return served

        served, less = among(new), self._less_important(view, rows, offers)
        if len(less) and not served.all():
            free = new.copy()
            free[less] = True
            chosen = among(free)
            if everyone.value[chosen].sum() > everyone.value[served].sum():
                self._give_way.update(view.slot[rows[less[~chosen[less]]]].tolist())
                served = chosen
        now_rate = rate.of(counts)
        backlog = float(everyone.prefill_tokens[~new].sum())
        return served[new].tolist(), backlog / now_rate if now_rate > 0 else None

    def _less_important(self, view: View, rows: Rows, offers: Sequence[Offer]) -> Rows:
        """Positions in `rows` of requests that nothing was computed of and that are less important
        than one of these offers: the least important, as many as the programme takes.
        """
        most = max(offer.importance for offer in offers)
        waiting = (view.phase[rows] == Phase.WAITING) & (view.generated_tokens[rows] == 0)
        less = (waiting & (view.importance[rows] < most)).nonzero()[0]
        order = np.argsort(view.importance[rows[less]], kind="stable")
        least: Rows = less[order[: EXACT_NEW - len(offers)]]
        return least

    def _rate(
        self, view: View, everyone: Demands, tiers: tuple[float, ...], most: Sequence[int]
    ) -> PrefillRate:
        """`most`: decodes by tier if all were taken."""
        context = float(everyone.context_tokens.mean())
        begins = everyone.prefill_tokens > 0
        draft = view.draft if self._set.speculate != "never" else None
        lengths = None
        if draft is not None:
            acc = self._acc(view)
            lengths = best_lengths(view.profile, draft, tiers, most, context, acc, MARGIN_S)
        return PrefillRate(
            view.profile,
            tiers,
            context,
            float(everyone.tpot_s[begins].min()),
            MARGIN_S,
            draft,
            lengths,
        )

    # ------------------------------------------------------------ batches (section 3.2)

    def plan(self, view: View) -> Sequence[Choice]:
        if not self._set.best_effort:
            return [prefill_first(view)]
        rows = view.standard.nonzero()[0]
        paces = demand.paces_of_rows(view, rows, self._lengths)
        tpot_s, due = np.full(view.rows, np.inf), np.full(view.rows, np.inf)
        tpot_s[rows], due[rows] = paces.tpot_s, paces.due_unix_s
        standing = Standing(tpot_s, due, self._tightest.at(view.start_unix_s))
        if self._give_way:
            return [self._relegating(view, standing)]
        if view.draft is None or self._set.speculate == "never":
            return batches(view, standing)
        drafting = self._drafting(view, standing)
        choice = None if drafting is None else speculating(view, standing, drafting)
        if choice is not None:
            return [choice]
        # Contexts grow, and a TTLT's pace moves: the next iteration may be one to draft in.
        return [replace(plain, repeats=1) for plain in batches(view, standing)]

    def _relegating(self, view: View, standing: Standing) -> Choice:
        """One batch without those that give way, who leave the replica unless they have begun."""
        give_way = np.isin(view.slot, list(self._give_way)) & (view.phase == Phase.WAITING)
        self._give_way.clear()
        slots = view.slot[give_way & view.standard]
        choice = batches(replace(view, best_effort=view.best_effort | give_way), standing)[0]
        stays = ~np.isin(choice.slots, slots)
        return replace(
            choice,
            slots=choice.slots[stays],
            caps=choice.caps[stays],
            relegate=slots.tolist(),
            repeats=1,
        )

    def _drafting(self, view: View, standing: Standing) -> Drafting | None:
        """Lengths for the standard decodes: appendix D's while there is anything to prefill; None
        where they are not to draft.
        """
        assert view.draft is not None
        rows = (view.in_decode & view.standard).nonzero()[0]
        if not len(rows):
            return None
        self._acceptance.begin(view.accepted_shares)
        tiers = tiers_of(standing.tpot_s[rows])
        tier = tier_along(standing.tpot_s[rows], tiers)
        counts = np.bincount(tier, minlength=len(tiers)).tolist()
        context = float(view.computed_tokens[rows].mean())
        prefills = self._set.speculate == "paper" or bool((~view.in_decode & view.standard).any())
        owed_s = self._owed_s(view, view.draft, rows, tier, len(tiers)) if prefills else None
        acc = self._acc(view)
        # profiles are corrected while they are used
        speed = view.profile.batch_s(BatchShape(PROBE_TOKENS, 1))
        asked = (
            tiers,
            tuple(counts),
            round(context / CONTEXT_STEP),
            round(self._acceptance.alpha, 2),
            round(speed, 4),
            owed_s,
            acc.made is acc.mean,
        )
        if self._solved is None or self._solved[0] != asked:
            those = view.profile, view.draft, tiers, counts, context, acc, MARGIN_S
            self._solved = asked, best_lengths(*those, owed_s) if prefills else fastest(*those)
        lengths = self._solved[1]
        if not lengths.drafts:
            return None
        return Drafting(lengths, acc, tightened(view, standing.tpot_s, acc.mean))

    def _owed_s(
        self, view: View, draft: Draft, rows: Rows, tier: Counts, tiers: int
    ) -> tuple[float, ...]:
        """[tiers] seconds of the decodes' contexts that the draft model has not read, for each
        token still expected of them, to 0.1 ms.
        """
        left = self._lengths.left(
            view.prompt_tokens[rows], view.max_tokens[rows], view.generated_tokens[rows]
        )
        missing = np.maximum(view.computed_tokens[rows] - view.draft_tokens[rows], 0)
        owed = token_s(draft.read_s) * np.bincount(tier, missing / np.maximum(left, 1.0), tiers)
        return tuple(owed.round(4).tolist())

    def _acc(self, view: View) -> Acc:
        """Acc(s), as far as the engine verifies."""
        alpha = self._acceptance.alpha
        mean = expected_tokens(alpha)
        acc = Acc(mean if self._set.speculate == "paper" else sure_tokens(alpha), mean)
        return acc.within(1 + view.deepest)

    def observe(self, seen: Observation) -> None:
        if seen.drafts is not None:
            self._acceptance.observe(seen.drafts)
        elif seen.shape.decodes:
            self._acceptance.forget(seen.iterations)
        for ended in seen.ended:
            self._lengths.observe(ended)


def _usable_s(view: View, due_s: Floats, batch_s: float) -> Floats:
    """Seconds until deadlines, less the loss of the batch that ends at a deadline: its decodes take
    their full time, however short it is.

    Batches of `batch_s` follow each other until then, as in Algorithm 2, whose floor(t / t0) would
    lose that whole batch.
    """
    rows = view.in_decode & view.standard
    decodes = max(int(np.count_nonzero(rows)), 1)
    alone_s = view.profile.batch_s(
        BatchShape(decodes=decodes, decode_context=int(view.computed_tokens[rows].sum()))
    )
    if alone_s >= batch_s:
        return due_s - alone_s
    whole_s = np.floor(np.maximum(due_s, 0.0) / batch_s) * batch_s
    usable: Floats = whole_s + np.maximum(due_s - whole_s - alone_s, 0.0) * batch_s / (
        batch_s - alone_s
    )
    return usable
