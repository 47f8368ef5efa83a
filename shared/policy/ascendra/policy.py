"""Ascendra (2025): two pools of replicas, low-priority ones (LP) for throughput, and high-priority
ones (HP) for requests that are about to be late.

LP (sections 4 and 5) batches out of order by a value under three budgets (lp_batch.py). It gives
back requests that it would serve too late, to be placed at HP (offload.py). HP (section 6) runs
prefills before decodes, in the order of arrival, as many requests as its memory allows
(elastic.py). New requests go to LP in turn, or to an HP that has a ticket out, which means that
nothing waits for prefill there. The five-coefficient model predicts iterations; it is refitted
while serving (refit.py).

A replica's pool is what its worker announces: `lp` or `hp`. A replica that announces neither is an
LP without an HP to offload to.

Where this differs from the paper:
- The controller has no state. A ticket is an HP digest that shows nothing waiting. HP declines the
  second request that comes on the same ticket.
- New and best-effort requests both use tickets. Best-effort requests that wait at HP hold none
  back, since they give way.
- FCFS at HP is by arrival in the system, so offloaded requests, which have waited, go before those
  that came with a ticket.
- *Overload*: a request still waiting when its deadline has passed is dropped in the paper. Here it
  is relegated and runs where standard requests leave room (relegated.py), unless the operator
  chooses the paper's way (`overload=drop`). A request that does not allow relegation is refused, as
  always.
- A preempted request computes its prompt again where it is. It is neither offloaded nor dropped.
- The batch size of LP bounds how many requests begin. Requests that a resync finds beyond it all
  run.
- Prompts longer than the maximum batch are computed in parts on HP too.
- Subgroups (section 8.7) are not kept apart: any LP offloads to any HP. The paper's search for the
  best mix is `slackline search`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct

from shared.perf.shape import BatchShape
from shared.policy import chunk
from shared.policy.ascendra import elastic, lp_batch, offload
from shared.policy.ascendra.lp_batch import VALUES, ValueName
from shared.policy.ascendra.refit import Refitted
from shared.policy.ascendra.relegated import in_the_room_left, standard_of
from shared.policy.chunk import Decoding, Rows
from shared.policy.fit import accept_what_fits
from shared.policy.lengths import OutputLengths
from shared.policy.overdue import dropping, past_due
from shared.policy.seam import Admission, Choice, Declared, Observation, View
from shared.routing.pipeline import Router
from shared.routing.routings import RouterName, with_tickets
from shared.schemas import Offer

LP, HP = "lp", "hp"

# Section 6.2 of the paper: the batch size of LP, and of HP where it is not elastic.
BATCH_REQUESTS = 128
# Ours: the maximum number of tokens in a batch. The paper does not state it.
BATCH_TOKENS = 2048
# Section 8.5: memory that stays free for decoding.
RESERVE = 0.1

# The mixes that sections 8.2 and 8.7 evaluate; more replicas are further subgroups of one kind.
SUBGROUPS = ("2L1H", "1L1H", "1L2H")


def pools(subgroup: str) -> Sequence[str]:
    """The pools of the replicas of one subgroup, such as 2L1H. HPs stand as far apart as can be, so
    that any number of replicas in a row has about the subgroup's mix.
    """
    low, high = (int(count) for count in subgroup.removesuffix("H").split("L"))
    of = low + high
    return [
        HP if ((i + 1) * high + (of - 1) // 2) // of > (i * high + (of - 1) // 2) // of else LP
        for i in range(of)
    ]


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings. `elastic` and `value` are the ablations of the paper's Figure 11, `tickets` is
    that of its section 6.1, `overload` its section 8.6, `subgroup` its Figure 13.
    """

    value: ValueName = "edf"
    batch_requests: Annotated[int, Meta(ge=1)] = BATCH_REQUESTS
    # LP's token budget; the largest batch of HP
    batch_tokens: Annotated[int, Meta(ge=1)] = BATCH_TOKENS
    # the threshold: batches that run at HP before an offloaded request
    worst_batches: Annotated[float, Meta(ge=0)] = 1.0
    elastic: bool = True
    tickets: bool = True  # False: HP takes offloaded requests alone
    reserve: Annotated[float, Meta(ge=0, le=1)] = RESERVE
    overload: Literal["relegate", "drop"] = "relegate"
    router: RouterName = "round_robin"  # section 4: within each pool in turn
    # Used by simulated fleets and `slackline up`. Other workers announce the pool that their
    # configuration names.
    subgroup: Annotated[str, Meta(pattern="^[1-9][0-9]?L[1-9][0-9]?H$")] = "2L1H"


def routing(settings: Settings) -> Router:
    """The controller (sections 4, 6.1): tickets of HP, LP in turn, offloaded requests to HP."""
    return with_tickets(settings.router, HP)


class Ascendra:
    """The policy. It learns output lengths per application and the coefficients of the performance
    model; the view holds all else.
    """

    name = "ascendra"

    def __init__(self, settings: Settings) -> None:
        self._set = settings
        self.declared = Declared(drops=settings.overload == "drop", pools=pools(settings.subgroup))
        self._lengths = OutputLengths()
        self._model = Refitted()

    def admit(self, view: View, offers: Sequence[Offer]) -> Sequence[Admission]:
        """HP takes offloaded requests, and one other if nothing waits for prefill (section 6.1)."""
        answers = list(accept_what_fits(view, offers))
        if view.pool != HP:
            return answers
        urgent = [offer.left == "offloaded" for offer in offers]
        waits = (~view.in_decode & view.standard).any()
        ticket = self._set.tickets and not (view.promised or waits or any(urgent))
        for n, (answer, offloaded) in enumerate(zip(answers, urgent, strict=True)):
            if answer.accepted and not offloaded:
                if not ticket:
                    answers[n] = Admission(False, reason="no ticket")
                ticket = False
        return answers

    # ------------------------------------------------------------ the instances (sections 5, 6)

    def plan(self, view: View) -> Sequence[Choice]:
        late = past_due(view)
        stays = ~view.in_decode
        stays[late] = False
        queue = (stays & view.standard).nonzero()[0]
        relegated = (stays & view.best_effort).nonzero()[0]
        waits = len(queue) + len(relegated) + len(late) > 0
        if view.pool == HP:
            return [self._ended(view, self._high(view, queue, relegated), late, waits)]
        batch, leaving = self._low(view, queue, relegated)
        batch = self._ended(view, batch, late, waits)
        if not len(leaving):
            return [batch]
        # A choice of its own: in the batch's choice the release would be told only when the batch
        # is done, and HP is not to wait for LP.
        return [
            Choice(release=[(slot, "offloaded") for slot in view.slot[leaving].tolist()]),
            batch,
        ]

    def _low(self, view: View, queue: Rows, relegated: Rows) -> tuple[Choice, Rows]:
        """Decodes, then prefills by value (Algorithm 1, section 5.4), then relegated requests in
        the room that is left; and the rows that leave for HP (section 5.3).
        """
        every = chunk.decoding(view)
        if not len(queue) and not view.best_effort.any():
            return chunk.fill(view, every, queue, limit_tokens=0), queue
        decodes = standard_of(view, every)
        model = self._model.now(view.profile)
        budget_s = lp_batch.compute_budget_s(view, decodes, model)
        limit_tokens = self._set.batch_tokens - len(decodes.rows)
        begun = int(np.count_nonzero(view.phase[queue] == chunk.PREFILL))
        order = lp_batch.by_value(
            view,
            queue,
            VALUES[self._set.value],
            self._set.batch_requests - len(decodes.rows) - begun,
        )
        priced = replace(view, profile=model)
        batch = chunk.fill(priced, decodes, order, limit_tokens=limit_tokens, budget_s=budget_s)
        leaving = queue[:0]
        if view.pool == LP and len(queue):
            longest_s = min(
                budget_s, model.batch_s(decodes.shape.with_chunk(max(limit_tokens, 1), 0))
            )
            urgent = offload.urgent(
                view,
                model,
                until_next_s=longest_s,
                batch_tokens=self._set.batch_tokens,
                worst_batches=self._set.worst_batches,
            )
            cut = lp_batch.begun_in_part(view, batch)
            leaving = urgent[~np.isin(view.slot[urgent], batch.slots) | (urgent == cut)]
            if cut in leaving:
                order = order[~np.isin(order, leaving)]
                batch = chunk.fill(
                    priced, decodes, order, limit_tokens=limit_tokens, budget_s=budget_s
                )
        late = lp_batch.by_value(view, relegated, VALUES[self._set.value], self._set.batch_requests)
        return self._with_relegated(priced, every, batch, order, late), leaving

    def _high(self, view: View, queue: Rows, relegated: Rows) -> Choice:
        """Prefills alone, first come first served, while there are any that memory allows; else
        decodes (sections 6, 6.2), with relegated requests in the room that they leave.
        """
        if len(queue):
            order = self._arrived(view, queue)
            # A block for each decode that is made to wait.
            free = view.kv_free_blocks - int(np.count_nonzero(view.in_decode))
            alone = Decoding(queue[:0], queue[:0], free, BatchShape())
            choice = chunk.fill(view, alone, order, limit_tokens=self._set.batch_tokens)
            if len(choice.slots):
                return choice
            # The queue waits for memory.
            relegated = relegated[view.phase[relegated] == chunk.PREFILL]
        every = chunk.decoding(view)
        batch = chunk.fill(view, standard_of(view, every), queue[:0], limit_tokens=0)
        late = self._arrived(view, relegated) if len(relegated) else relegated
        return self._with_relegated(view, every, batch, queue[:0], late)

    def _arrived(self, view: View, queue: Rows) -> Rows:
        """The rows of the queue that HP may serve, first come first served: those that have begun,
        and as many others as memory allows.
        """
        order = chunk.in_order(view, queue)
        begins = view.phase[order] != chunk.PREFILL
        begun = (view.phase == chunk.PREFILL).nonzero()[0]
        if self._set.elastic:
            reserve = elastic.reserve_blocks(view, self._lengths, self._set.reserve)
            most = elastic.admitted(view, begun, order[begins], reserve)
        else:
            decoding = int(np.count_nonzero(view.in_decode))
            most = max(self._set.batch_requests - decoding - len(begun), 0)
        served: Rows = order[~begins | (begins.cumsum() <= most)]
        return served

    def _with_relegated(
        self, view: View, every: Decoding, batch: Choice, order: Rows, relegated: Rows
    ) -> Choice:
        if not view.best_effort.any():
            return batch
        return in_the_room_left(
            view,
            every,
            batch,
            order,
            relegated,
            limit_requests=self._set.batch_requests,
            limit_tokens=self._set.batch_tokens,
            budget_s=lp_batch.compute_budget_s(view, standard_of(view, every), view.profile),
        )

    def _ended(self, view: View, choice: Choice, late: Rows, waits: bool) -> Choice:
        """The choice, with those given up who waited past their deadline (section 6.3). While some
        wait, it is good for once.
        """
        if not waits:
            return choice
        if self._set.overload == "drop":
            return dropping(view, choice, late)
        return replace(choice, relegate=view.slot[late].tolist(), repeats=1)

    # ------------------------------------------------------------ learning

    def observe(self, seen: Observation) -> None:
        self._model.observe(seen.shape, seen.exec_s, seen.at_unix_s)
        for ended in seen.ended:
            self._lengths.observe(ended)
