"""SLOs-Serve's dynamic programme over prefill deadlines, which chooses the new requests to take
(section 3.2.1, appendix C).

Items are the requests whose prefill has not ended, new ones and those taken before, in the order of
their prefill deadlines. Requests taken before are forced in. Between two deadlines the prefill
budget grows at the rate PB*(1, n), where n counts, for each TPOT tier, the decodes by then; an item
taken uses up its prefill tokens and counts as a decode from its deadline on. Three conditions hold:
the budget is never negative at the deadline of an item taken; decodes find the time they need in
every stretch and at the end; memory suffices.

The paper's table DP[i, m, pb, n] is kept sparse: a state is (n, m, pb, value), and a state that is
no better in any of these than another with the same n is dropped. Where all memory fits, m is left
out. With equal values the value is the count, which n determines, so appendix C's pb[i, m, n] is
left, of which the largest is kept. So one programme serves both forms of the appendix. "Last
accepted j" is walked item by item.

PB* is linear in time here: batches need not end at deadlines, and policy.py subtracts
the loss at a deadline beforehand.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shared.columns import Ints
from shared.policy.seam import Bools, Floats

Counts = NDArray[np.int64]

# Tokens that rounding may take: far below one.
CLOSE_TOKENS = 1e-6


class Rate(Protocol):
    """PB*(1 s, n): prefill tokens per second beside `counts` decodes of each tier; -inf where these
    alone are too many.
    """

    def of(self, counts: tuple[int, ...]) -> float: ...

    def along(self, counts: Counts) -> Floats:
        """The same for each row of [states, tiers]."""


class Problem(NamedTuple):
    """The items, in columns by rising deadline. The forced items can be served if no new one is
    taken (`eased` sees to that).
    """

    due_s: Floats  # from now
    prefill_tokens: Floats
    blocks: Ints
    value: Floats
    tier: Ints
    new: Bools
    decoding: tuple[int, ...]  # decodes there are already, by tier
    free_blocks: int  # for new ones
    rate: Rate


def choose(problem: Problem) -> Bools:
    """[items] the requests that are served: all forced ones, and a subset of the new ones with the
    largest value.
    """
    none = ~problem.new
    new = problem.new.nonzero()[0]
    all_served = np.ones(len(problem.new), dtype=np.bool_)
    if not len(new) or holds(problem, all_served):
        return all_served
    if len(new) == 1:
        return none  # there is no other subset
    values = problem.value[new]
    states = _States(
        np.array([problem.decoding], dtype=np.int64),
        np.zeros(1),
        np.zeros(1, dtype=np.int64),
        np.zeros(1),
        np.zeros(1, dtype=np.int64),
    )
    by_memory = bool(problem.blocks[new].sum() > problem.free_blocks)
    by_value = bool(values.min() < values.max())
    at_s, bit = 0.0, 1
    for i, due_s in enumerate(problem.due_s.tolist()):
        if due_s > at_s:
            states = states.after(due_s - at_s, problem.rate)
            at_s = due_s
        if not len(states.pb):
            return none  # the forced alone ask for too much
        taken = states.with_item(problem, i, bit, by_memory)
        if problem.new[i]:
            bit <<= 1
            states = _undominated(states.joined(taken), by_memory, by_value)
        else:
            states = taken
    states = states.kept(problem.rate.along(states.counts) >= 0)
    if not len(states.pb):
        return none
    best = int(np.lexsort((states.taken, -states.pb, -states.value))[0])
    served = none
    served[new] = (int(states.taken[best]) >> np.arange(len(new))) & 1 == 1
    return served


class Walk:
    """The items of one subset in order, and the state of the conditions after each."""

    def __init__(self, problem: Problem) -> None:
        self._rate, self._free_blocks = problem.rate, problem.free_blocks
        self._items = list(
            zip(
                problem.due_s.tolist(),
                problem.prefill_tokens.tolist(),
                problem.tier.tolist(),
                np.where(problem.new, problem.blocks, 0).tolist(),
                strict=True,
            )
        )
        self.counts = list(problem.decoding)
        self.at_s, self.pb, self.used = 0.0, 0.0, 0

    def serve(self, i: int) -> bool:
        """False if the item breaks the prefill budget, or if the decodes before it lack time."""
        due_s, prefill_tokens, tier, new_blocks = self._items[i]
        decodes_fit = True
        if due_s > self.at_s:
            rate = self._rate.of(tuple(self.counts))
            decodes_fit = rate >= 0
            self.pb += (due_s - self.at_s) * max(rate, 0.0)
            self.at_s = due_s
        self.pb -= prefill_tokens
        self.counts[tier] += 1
        self.used += new_blocks
        return decodes_fit and self.pb >= -CLOSE_TOKENS

    def serve_all(self, items: Sequence[int]) -> bool:
        """Serves all items, in order, whatever breaks. False if any did."""
        kept = True
        for i in items:
            kept = self.serve(i) and kept
        return kept

    @property
    def memory_fits(self) -> bool:
        return self.used <= self._free_blocks

    @property
    def decodes_fit(self) -> bool:
        """Tells whether all decodes served so far fit together."""
        return self._rate.of(tuple(self.counts)) >= 0


def holds(problem: Problem, served: Bools) -> bool:
    """Tells whether all of these can be served: the condition itself, for one subset."""
    walk = Walk(problem)
    return walk.serve_all(served.nonzero()[0].tolist()) and walk.memory_fits and walk.decodes_fit


def eased(problem: Problem, never_s: float) -> Problem:
    """The same problem with lost deadlines of forced items moved to when the items can be served: a
    lost request must not forbid everything, nor become worse. A deadline moves to `never_s` where
    there is no time for prefill at all. Items are sorted again.
    """
    due_s, forced = problem.due_s.copy(), ~problem.new
    counts, at_s, pb = list(problem.decoding), 0.0, 0.0
    moved_s = []
    for asked_s, tokens, tier in zip(
        due_s[forced].tolist(),
        problem.prefill_tokens[forced].tolist(),
        problem.tier[forced].tolist(),
        strict=True,
    ):
        rate = problem.rate.of(tuple(counts))
        until_s = max(asked_s, at_s)
        pb += (until_s - at_s) * max(rate, 0.0) - tokens
        if pb < 0:
            until_s = until_s - pb / rate if rate > 0 else never_s
            pb = 0.0
        at_s = until_s
        moved_s.append(until_s)
        counts[tier] += 1
    due_s[forced] = moved_s
    order = np.argsort(due_s, kind="stable")
    return problem._replace(
        due_s=due_s[order],
        prefill_tokens=problem.prefill_tokens[order],
        blocks=problem.blocks[order],
        value=problem.value[order],
        tier=problem.tier[order],
        new=problem.new[order],
    )


class _States(NamedTuple):
    """The table's entries for one i; columns run along them."""

    counts: Counts  # [states, tiers]
    pb: Floats
    used: Counts  # blocks; 0 where memory does not matter
    value: Floats
    taken: Counts  # bits, the new items in order

    def kept(self, which: Bools | NDArray[np.intp]) -> "_States":
        return _States(
            self.counts[which],
            self.pb[which],
            self.used[which],
            self.value[which],
            self.taken[which],
        )

    def joined(self, other: "_States") -> "_States":
        return _States(
            np.concatenate((self.counts, other.counts)),
            np.concatenate((self.pb, other.pb)),
            np.concatenate((self.used, other.used)),
            np.concatenate((self.value, other.value)),
            np.concatenate((self.taken, other.taken)),
        )

    def after(self, span_s: float, rate: Rate) -> "_States":
        """The states after `span_s`: budgets are grown, states with too many decodes removed."""
        rates = rate.along(self.counts)
        alive = rates >= 0
        grown = self._replace(pb=self.pb + span_s * np.where(alive, rates, 0.0))
        return grown if alive.all() else grown.kept(alive)

    def with_item(self, problem: Problem, i: int, bit: int, by_memory: bool) -> "_States":
        """The states with item i added, where that is possible."""
        counts, used, value, taken = self.counts.copy(), self.used, self.value, self.taken
        counts[:, problem.tier[i]] += 1
        pb = self.pb - problem.prefill_tokens[i]
        possible = pb >= -CLOSE_TOKENS
        if problem.new[i]:
            value, taken = value + problem.value[i], taken | bit
            if by_memory:
                used = used + problem.blocks[i]
                possible &= used <= problem.free_blocks
        return _States(counts, pb, used, value, taken).kept(possible)


def _undominated(states: _States, by_memory: bool, by_value: bool) -> _States:
    """The states that no other state with the same counts beats or equals in budget, memory and
    value. Of equal states the first stays.
    """
    radix = np.cumprod(np.concatenate(((1,), states.counts.max(axis=0)[:-1] + 1)))
    code = states.counts @ radix
    if by_memory and by_value:
        better = (
            (code[:, None] == code)
            & (states.pb[:, None] >= states.pb)
            & (states.used[:, None] <= states.used)
            & (states.value[:, None] >= states.value)
        )
        same = better & better.T
        beaten = better & (~same | np.triu(np.ones_like(same), 1))
        return states.kept(~beaten.any(axis=0))
    second = states.used if by_memory else -states.value
    order = np.lexsort((-states.pb, second, code))
    pb, code = states.pb[order], code[order]
    group = np.concatenate(((0,), np.cumsum(code[1:] != code[:-1])))
    span = float(pb.max() - pb.min()) + 1.0
    lifted = pb + group * span  # groups lie above each other, so one running maximum serves all
    best = np.maximum.accumulate(lifted)
    keep = np.concatenate(((True,), (lifted[1:] > best[:-1]) & (pb[1:] > -np.inf)))
    keep[1:] |= group[1:] != group[:-1]
    return states.kept(order[keep])
