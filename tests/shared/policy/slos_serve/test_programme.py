"""Tests of SLOs-Serve's admission: the dynamic programme against brute force."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.policy.seam import Bools, Floats
from shared.policy.slos_serve.programme import Counts, Problem, choose, eased

TPOT_S = (0.05, 0.1)


@dataclass(frozen=True)
class Line:
    """A budget line: so many tokens a second, less those that decodes take; never below zero."""

    tokens_per_s: float
    tpot_s: Sequence[float] = TPOT_S

    def of(self, counts: tuple[int, ...]) -> float:
        left = self.tokens_per_s - sum(
            n / tpot_s for n, tpot_s in zip(counts, self.tpot_s, strict=True)
        )
        return left if left >= 0 else -math.inf

    def along(self, counts: Counts) -> Floats:
        return np.array([self.of(tuple(row)) for row in counts.tolist()])


def problem(
    due_s: Sequence[float],
    tokens: Sequence[float],
    *,
    new: Sequence[bool] | None = None,
    value: Sequence[float] | None = None,
    blocks: Sequence[int] | None = None,
    tier: Sequence[int] | None = None,
    decoding: tuple[int, ...] = (0, 0),
    free_blocks: int = 1 << 30,
    tokens_per_s: float = 1000.0,
) -> Problem:
    order = np.argsort(np.array(due_s), kind="stable")
    n = len(due_s)

    def column(values: Sequence[float] | None, default: float, kind: type) -> np.ndarray:
        return np.array([default] * n if values is None else values, dtype=kind)[order]

    return Problem(
        np.array(due_s, dtype=np.float64)[order],
        np.array(tokens, dtype=np.float64)[order],
        column(blocks, 1, np.int64),
        column(value, 1.0, np.float64),
        column(tier, 0, np.int64),
        column(new, True, np.bool_),
        decoding,
        free_blocks,
        Line(tokens_per_s),
    )


def possible(of: Problem, served: Sequence[int]) -> bool:
    """The paper's condition (section 3.2), written down once more: demand below the budget line at
    each prefill deadline.
    """
    counts, budget, demand, at_s = list(of.decoding), 0.0, 0.0, 0.0
    for i in served:
        rate = of.rate.of(tuple(counts))
        if of.due_s[i] > at_s:
            if rate < 0:
                return False
            budget, at_s = budget + rate * (of.due_s[i] - at_s), of.due_s[i]
        demand += of.prefill_tokens[i]
        if demand > budget + 1e-6:
            return False
        counts[of.tier[i]] += 1
    memory = sum(int(of.blocks[i]) for i in served if of.new[i])
    return memory <= of.free_blocks and of.rate.of(tuple(counts)) >= 0


def by_brute_force(of: Problem) -> float | None:
    """The largest value of any subset of the new requests; None if not even the forced ones can be
    served.
    """
    forced = [i for i in range(len(of.new)) if not of.new[i]]
    new = [i for i in range(len(of.new)) if of.new[i]]
    values = [
        sum(float(of.value[i]) for i in some)
        for size in range(len(new) + 1)
        for some in itertools.combinations(new, size)
        if possible(of, sorted([*forced, *some]))
    ]
    return max(values, default=None)


def value_of(of: Problem, served: Bools) -> float:
    return float(of.value[served & of.new].sum())


def drawn(rng: Random, *, new: int, forced: int, values: bool, memory: bool, tiers: int) -> Problem:
    """Requests that ask for about twice as much as can be served."""
    n = new + forced
    tokens = [rng.choice([50, 200, 500, 1000, 2000]) * rng.uniform(0.5, 1.0) for _ in range(n)]
    return eased(
        problem(
            [rng.uniform(0.1, 0.5 * sum(tokens) / 1000) for _ in range(n)],
            tokens,
            new=[i < new for i in range(n)],
            value=[rng.choice([0.5, 1.0, 1.5, 4.0, 10.0]) if values else 1.0 for _ in range(n)],
            blocks=[rng.randint(1, 40) for _ in range(n)],
            tier=[rng.randrange(tiers) for _ in range(n)],
            decoding=(rng.randint(0, 25), rng.randint(0, 10) if tiers > 1 else 0),
            free_blocks=rng.randint(0, 20 * new) if memory else 1 << 30,
        ),
        never_s=1e6,
    )


@given(
    seed=st.integers(0, 10**9),
    new=st.integers(0, 7),
    forced=st.integers(0, 4),
    values=st.booleans(),
    memory=st.booleans(),
    tiers=st.integers(1, 2),
)
def test_the_programme_is_as_good_as_brute_force(
    seed: int, new: int, forced: int, values: bool, memory: bool, tiers: int
) -> None:
    of = drawn(Random(seed), new=new, forced=forced, values=values, memory=memory, tiers=tiers)
    best = by_brute_force(of)
    served = choose(of)
    assert served[~of.new].all()
    assert best is not None or of.rate.of(of.decoding) < 0 or new + forced > 0
    if best is not None:
        assert possible(of, served.nonzero()[0].tolist())
        assert value_of(of, served) == pytest.approx(best)
    else:
        assert value_of(of, served) == 0


def test_beside_decodes_that_are_too_many_already_nobody_is_taken() -> None:
    of = eased(
        problem([1.0, 2.0, 0.5], [10.0, 10.0, 10.0], new=[True, True, False], decoding=(60, 0)),
        never_s=1e6,
    )
    assert choose(of).tolist() == [False, False, True]


def test_a_forced_deadline_that_is_lost_keeps_nobody_out_who_comes_later() -> None:
    of = eased(
        problem([0.5, 3.0, 0.7], [1000.0, 1500.0, 10.0], new=[False, True, True]), never_s=1e6
    )
    assert of.due_s.tolist() == pytest.approx([0.7, 1.0, 3.0])  # the forced one can end at 1 s
    assert choose(of).tolist() == [False, True, True]  # to begin sooner would make it later still
