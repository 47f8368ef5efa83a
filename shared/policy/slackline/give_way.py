"""Decides which requests give way, by one rule: for an offer, in the queue, and for promotion.

Prefills are taken in the order in which they are due. Up to each due time there must be time for
them, for the passes of the decodes until then, for a batch that ends there, and for the tokens of
those whose prefill ended before. At the first due time where there is too little, the request due
by then that is least important gives way, and of equals the one that takes longest (Moore and
Hodgson's rule, which leaves the fewest late). For offers KV is a second resource in the same walk.
"""

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from shared.columns import least
from shared.perf.shape import BatchShape
from shared.policy.seam import Bools, Floats, View
from shared.policy.slackline.bounds import EARLY_S, MARGIN_S, Decodes, Prefills, early
from shared.policy.slackline.kv import Room
from shared.policy.slackline.prices import Prices

LOOKS = 512  # beyond so many in the order of due times, arrivals decide more than what waits
ROUNDING_S = 1e-9
BATCH_TOKENS = 4096  # the most prompt tokens of an iteration


class Passes(NamedTuple):
    """The passes that the present decodes need: one in each period, the tightest pace."""

    first_s: float  # the first must have begun by then; inf without a decode
    ends_s: float  # it ends then, if it begins as late as that
    every_s: float
    seconds: float  # of each, beside prompts
    batch_s: float  # the fixed part of a batch without any

    def until(self, due_s: Floats) -> Floats:
        """[due times] seconds of the passes begun by then, and of a batch that ends between two."""
        if math.isinf(self.first_s):
            return np.full(len(due_s), self.batch_s + MARGIN_S)
        count = np.maximum(np.floor((due_s - self.first_s) / self.every_s) + 1.0, 0.0)
        between = (count == 0) | (due_s > self.ends_s + (count - 1.0) * self.every_s)
        seconds: Floats = count * self.seconds + between * (self.batch_s + MARGIN_S)
        return seconds


def passes_of(view: View, decodes: Decodes, prices: Prices, speed: float) -> Passes:
    """The passes of these decodes; one of a looser pace runs in a part of them. `speed`: drafts
    bring so many times the tokens in the time.
    """
    if not len(decodes.rows):
        return Passes(math.inf, math.inf, math.inf, 0.0, prices.batch_s)
    tightest_s = least(decodes.pace_s)
    share = tightest_s / decodes.pace_s
    shape = BatchShape(
        decodes=math.ceil(share.sum() - ROUNDING_S),
        decode_context=int(share.dot(view.top_tokens[decodes.rows])),
    )
    alone_s = view.profile.batch_s(shape)
    first_s = max(least(decodes.latest_s) - alone_s, 0.0)
    every_s = max(speed * tightest_s, alone_s)
    beside_s = shape.decodes * prices.decode_s + shape.decode_context * prices.context_s
    beside_s += prices.batch_s
    # beside prompts a pass costs no more than it adds to their batch
    pass_s = min(alone_s, beside_s) if every_s > alone_s + MARGIN_S else alone_s
    return Passes(first_s, first_s + alone_s, every_s, pass_s, prices.batch_s)


def give_way(asks: Prefills, passes: Passes, room: Room | None = None) -> Bools:
    """[asks] those that cannot all be in time, or find KV in `room`, so that the others can."""
    if _plenty(asks, passes, room):
        return np.zeros(len(asks.due_s), dtype=np.bool_)
    due_s = in_order(asks)
    gone = _late(asks, due_s, passes, room)
    if due_s is not asks.due_s and np.count_nonzero(gone):
        more = asks.value > least(asks.value)
        if np.count_nonzero(gone & more):  # with all of their time they may be in time
            rest = ~gone | more
            gone[rest] = _late(asks.taken(rest), asks.due_s[rest], passes, room)
    return gone


def in_order(asks: Prefills) -> Floats:
    """[asks] the due times by which they are done in order: what is more important than the least
    earlier, so that others give way first where the forecast is not exact.
    """
    more = asks.value > least(asks.value)
    if not np.count_nonzero(more):
        return asks.due_s
    return np.where(more, early(asks.due_s), asks.due_s)


def _plenty(asks: Prefills, passes: Passes, room: Room | None) -> bool:
    """True if all that they ask for fits before the first due time, so that none is late."""
    if room is not None and float(asks.blocks.sum()) > room.free:
        return False
    first_s = least(asks.due_s)
    first_s = max(first_s - EARLY_S, first_s / 2)  # as `early` has it
    count = max((first_s - passes.first_s) / passes.every_s + 1.0, 0.0) if passes.seconds else 0.0
    spare_s = first_s - count * passes.seconds - passes.batch_s - MARGIN_S
    return float(asks.seconds.sum() + asks.decode_s.dot(asks.output_tokens)) < spare_s - MARGIN_S


def _late(asks: Prefills, by_s: Floats, passes: Passes, room: Room | None) -> Bools:
    """The same with these due times."""
    hopeless: Bools = asks.seconds + passes.batch_s > by_s
    order = by_s.argsort(kind="stable")[:LOOKS]
    due_s, seconds = by_s[order], asks.seconds[order]
    spare_s = due_s - passes.until(due_s)
    rate = (asks.decode_s / asks.pace_s)[order]  # of the GPU's time, once it decodes
    most_s = (asks.decode_s * asks.output_tokens)[order]
    decoding_s = np.minimum(rate.cumsum() * due_s - (rate * due_s).cumsum(), most_s.cumsum())
    found = np.zeros(len(by_s), dtype=np.bool_)
    short: Bools = seconds.cumsum() + decoding_s > spare_s
    blocks, free = (none := np.zeros(len(order))), none
    if room is not None:
        blocks, free = asks.blocks[order], room.until(due_s - seconds)
        short |= blocks.cumsum() > free
    if np.count_nonzero(short):
        # up to the last due time before which passes leave no time at all, every prefill
        begin = int((spare_s < -ROUNDING_S).nonzero()[0].max(initial=-1)) + 1
        found[order[:begin]] = True
        value, lost = asks.value[order], hopeless[order]
        columns = (due_s, spare_s, seconds, rate, most_s, value, lost, blocks, free)
        items = list(zip(*(column[begin:].tolist() for column in columns), strict=True))
        # those before `begin` are gone, so that none is short before the first short one
        gone = _gone(items, max(int(short.argmax()) - begin, 0))
        found[order[begin:][gone]] = True
    if len(order) < len(found):
        rest = np.ones(len(found), dtype=np.bool_)
        rest[order] = False
        found |= rest & hopeless
    return found


# Due and spare seconds (until due, beside the passes), those of its prefill, the rate and the most
# seconds of its decode, its importance, whether it is hopeless, the blocks that it needs, and those
# that are free by then.
Item = tuple[float, float, float, float, float, float, bool, float, float]


def _gone(items: Sequence[Item], first: int) -> list[int]:
    """The places of those that give way, in the order of their due times. Up to `first` all are in
    time.
    """
    gone: set[int] = set()
    before = items[:first]
    by_time = [(not item[6], item[5], -item[2], -k) for k, item in enumerate(before)]
    by_kv = [(item[5], -item[7], -k) for k, item in enumerate(before)]
    heapify(by_time)
    heapify(by_kv)
    ahead_s, share = sum(item[2] for item in before), sum(item[3] for item in before)
    from_s, most_s = sum(item[0] * item[3] for item in before), sum(item[4] for item in before)
    needed = sum(item[7] for item in before)
    for k in range(first, len(items)):
        due_s, spare_s, seconds, rate, decoding_s, value, no_hope, blocks, free = items[k]
        heappush(by_time, (not no_hope, value, -seconds, -k))
        heappush(by_kv, (value, -blocks, -k))
        ahead_s += seconds
        share += rate
        from_s += rate * due_s
        most_s += decoding_s
        needed += blocks
        while True:
            if by_time and ahead_s + min(share * due_s - from_s, most_s) > spare_s + ROUNDING_S:
                i = -heappop(by_time)[3]
            elif by_kv and needed > free and blocks:
                i = -heappop(by_kv)[2]
            else:
                break
            if i in gone:
                continue
            gone.add(i)
            of_due_s, _, seconds, rate, decoding_s, _, _, blocks_of, _ = items[i]
            ahead_s -= seconds
            share -= rate
            from_s -= rate * of_due_s
            most_s -= decoding_s
            needed -= blocks_of
    return sorted(gone)
