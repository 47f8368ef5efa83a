"""The requests that give way when not all can be served: a forecast of the queue in the order in
which prefills are due, in the manner of Moore and Hodgson's rule for the fewest late jobs.

Up to each deadline there must be time for the prefills due by then, for the passes that the decodes
make meanwhile, for a batch that ends there, and for the tokens of those whose prefill ended before.
At the first deadline where there is too little, requests due by then give way: all that could not
be in time even alone, else of the least important the one whose prefill takes longest, of equals
the one due last. Before the last deadline up to which passes leave no time at all, all give way. So
the fewest are lost, and one that was taken in does not give way to another of its kind.
"""

import math
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from shared.columns import Indices
from shared.policy.seam import Bools, Floats
from shared.policy.slackline.token_order import MARGIN_S

# Beyond so many in the order of due times, what is to come decides more than what waits.
LOOKS = 512
ROUNDING_S = 1e-9
# The more important are to be done so much before they are due, but in no less than half of their
# time: what comes before them may take longer than predicted, and others then give way first.
EARLY_S = 0.2
HALF = 0.5


class Work(NamedTuple):
    """Prefills to come, in columns; seconds from now."""

    due_s: Floats
    seconds: Floats  # of its prefill in full batches
    value: Floats  # its importance
    pace_s: Floats  # of its decode
    decode_s: Floats  # of one token of its decode
    output_tokens: Floats

    def taken(self, index: Indices) -> "Work":
        return Work(*(column[index] for column in self))

    def beside(self, other: "Work") -> "Work":
        return Work(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))


def favoured(work: Work) -> Work:
    """The work with the due times by which it is done in order: earlier for those that are more
    important than the least.
    """
    more = work.value > work.value.min(initial=math.inf)
    if not np.count_nonzero(more):
        return work
    return work._replace(due_s=np.where(more, early_s(work.due_s), work.due_s))


def early_s(due_s: Floats) -> Floats:
    """The instants at which more important prefills that are due then are to be done."""
    early: Floats = np.maximum(due_s - EARLY_S, HALF * due_s)
    return early


class Passes(NamedTuple):
    """The passes that the present decodes need."""

    first_s: float  # the first must have begun by then; inf without a decode
    ends_s: float  # it ends then, if it begins as late as that
    every_s: float
    seconds: float  # of each
    batch_s: float  # the fixed part of a batch without any

    def until(self, due_s: Floats) -> Floats:
        """[deadlines] seconds of the passes begun by then; where one comes between two passes, of
        the batch that ends there as well.
        """
        if not math.isfinite(self.first_s):
            return np.full(len(due_s), self.batch_s + MARGIN_S)
        count = np.maximum(np.floor((due_s - self.first_s) / self.every_s) + 1.0, 0.0)
        between = (count == 0) | (due_s > self.ends_s + (count - 1.0) * self.every_s)
        seconds: Floats = count * self.seconds + between * (self.batch_s + MARGIN_S)
        return seconds


def give_way(work: Work, early: Work, passes: Passes) -> Bools:
    """[prefills] a mask of those that cannot all be in time, so that the others can. `early`: the
    work as `favoured` has it.
    """
    gone = _late(early, passes)
    if early is work or not np.count_nonzero(gone):
        return gone
    more = work.value > work.value.min()
    if np.count_nonzero(gone & more):  # with all of their time they may be in time
        rest = ~gone | more
        gone[rest] = _late(work.taken(rest), passes)
    return gone


def look_again(work: Work, gone: Bools, again: Bools, due_s: Floats, passes: Passes) -> Bools:
    """[prefills] the mask of those that give way, once those in `again` are due by `due_s` [again]:
    the ones that can be in time then, with nobody else late for them, stay. `gone`: as `give_way`
    has it.
    """
    tried = (~gone | again).nonzero()[0]
    later = work.due_s.copy()
    later[again] = due_s
    value = np.where(again, work.value - np.ptp(work.value) - 1.0, work.value)
    found = gone.copy()
    found[tried] = _late(work._replace(due_s=later, value=value).taken(tried), passes)
    return gone & found


def _late(work: Work, passes: Passes) -> Bools:
    """The same by these due times. Only the LOOKS first to be due are weighed against each other;
    of the others those that could not be in time even alone give way.
    """
    hopeless: Bools = work.seconds + passes.batch_s > work.due_s
    order = work.due_s.argsort(kind="stable")[:LOOKS]
    due_s, seconds = work.due_s[order], work.seconds[order]
    spare_s = due_s - passes.until(due_s)
    rate = (work.decode_s / work.pace_s)[order]  # of the GPU's time, once it decodes
    most_s = (work.decode_s * work.output_tokens)[order]
    decoding_s = np.minimum(rate.cumsum() * due_s - (rate * due_s).cumsum(), most_s.cumsum())
    found = np.zeros(len(work.due_s), dtype=np.bool_)
    if np.count_nonzero(seconds.cumsum() + decoding_s > spare_s):
        # up to the last due time before which passes leave no time at all, every prefill
        begin = int((spare_s < -ROUNDING_S).nonzero()[0].max(initial=-1)) + 1
        found[order[:begin]] = True
        columns = (due_s, spare_s, seconds, rate, most_s, work.value[order], hopeless[order])
        gone = _gone(zip(*(column[begin:].tolist() for column in columns), strict=True))
        found[order[begin:][gone]] = True
    if len(order) < len(found):
        rest = np.ones(len(found), dtype=np.bool_)
        rest[order] = False
        found |= rest & hopeless
    return found


# Due and spare seconds (until due, beside the passes), those of its prefill, the rate and the most
# seconds of its decode, its importance, and whether it is hopeless.
Item = tuple[float, float, float, float, float, float, bool]


def _gone(queue: Iterable[Item]) -> list[int]:
    """The places of those that give way, in the order of their due times."""
    items: list[Item] = []
    gone: list[int] = []
    lost: list[int]
    hopeless: list[int] = []
    first: list[tuple[float, float, int]] = []  # a heap
    ahead_s = share = from_s = most_s = 0.0
    for k, item in enumerate(queue):
        due_s, spare_s, seconds, rate, decoding_s, value, no_hope = item
        items.append(item)
        if no_hope:
            hopeless.append(k)
        else:
            heappush(first, (value, -seconds, -k))
        ahead_s += seconds
        share += rate
        from_s += rate * due_s
        most_s += decoding_s
        while ahead_s + min(share * due_s - from_s, most_s) > spare_s + ROUNDING_S:
            if hopeless:
                lost, hopeless = hopeless, []
            elif first:
                lost = [-heappop(first)[2]]
            else:
                break
            gone += lost
            for i in lost:
                of_due_s, _, seconds, rate, decoding_s, _, _ = items[i]
                ahead_s -= seconds
                share -= rate
                from_s -= rate * of_due_s
                most_s -= decoding_s
    return gone
