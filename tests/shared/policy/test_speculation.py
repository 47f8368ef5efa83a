"""Tests of the choice of drafts to verify: within budget and caps, connected, the neediest first
([adaserve] Algorithm 2).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shared.columns import Ints, pack
from shared.errors import PeerError
from shared.perf.draft import Draft
from shared.policy.need import Needs
from shared.policy.speculation import METHODS, Candidates, depths_of, draft_s, select
from shared.schemas import Selection
from tests.shared.policy.views import Linear


@dataclass(frozen=True)
class Drafted:
    selection: Selection
    caps: Ints
    entry: Ints  # of each node
    parent: Ints  # the node that it extends; -1: the root
    path: NDArray[np.float64]
    needed: list[float]
    depth: list[int]
    at: list[tuple[int, int, int]]  # level, entry and beam of each node

    @classmethod
    def of(
        cls,
        selection: Selection,
        caps: Ints,
        entry: list[int],
        parent: list[int],
        path: list[float],
        *others: Any,
    ) -> "Drafted":
        nodes = np.array(entry, dtype=np.int32), np.array(parent, dtype=np.int32)
        return cls(selection, caps, *nodes, np.array(path, dtype=np.float64), *others)

    def selected(self) -> NDArray[np.bool_]:
        """[nodes] the selection."""
        chosen = select(
            self.selection, self.caps, as_needs(self.needed), grid(self.at, self.path, self.depth)
        )
        nodes = np.array([chosen[at] for at in self.at], dtype=np.bool_)
        assert np.count_nonzero(nodes) == np.count_nonzero(chosen), "a node that is not there"
        return nodes


def as_needs(needed: Sequence[float]) -> Needs:
    return np.array(needed, dtype=np.float32)


def grid(
    at: Sequence[tuple[int, int, int]], path: Sequence[float], depth: Sequence[int]
) -> Candidates:
    """The nodes that are at these levels, entries and beams."""
    levels, beams = (max((node[axis] + 1 for node in at), default=0) for axis in (0, 2))
    shape = levels, len(depth), beams
    there, paths = np.zeros(shape, dtype=np.bool_), np.full(shape, np.nan)
    for node, chance in zip(at, path, strict=True):
        there[node], paths[node] = True, chance
    return Candidates(np.array(depth, dtype=np.int32), there, paths)


@st.composite
def drafted(draw: st.DrawFn) -> Drafted:
    """Trees as a draft makes them: level by level, each node's path probability below its
    parent's.
    """
    rng = Random(draw(st.integers(0, 1 << 32)))
    entries = draw(st.integers(1, 6))
    depth = [draw(st.integers(0, 4)) for _ in range(entries)]
    width = [draw(st.integers(1, 4)) for _ in range(entries)]
    entry, parent, path = list[int](), list[int](), list[float]()
    at = list[tuple[int, int, int]]()
    for e in range(entries):
        level = [(-1, 1.0)]
        for deep in range(depth[e]):
            below = []
            for beam in range(width[e]):
                at.append((deep, e, beam))
                above, chance = rng.choice(level)
                below.append((len(entry), chance * rng.random()))
                entry.append(e)
                parent.append(above)
                path.append(below[-1][1])
            level = below
    needed = [draw(st.floats(0, 6, width=32)) for _ in range(entries)]
    selection = Selection(
        method="slo_then_throughput",
        depth=pack(depth),
        width=pack(width),
        budget_tokens=draw(st.integers(0, 40)),
        needed_limit_tokens=draw(st.integers(1, 8)),
    )
    caps = np.array([draw(st.integers(1, 8)) for _ in range(entries)], dtype=np.int32)
    return Drafted.of(selection, caps, entry, parent, path, needed, depth, at)


@given(drafted())
def test_a_selection_is_connected_within_the_budget_and_within_every_cap(given: Drafted) -> None:
    chosen = given.selected()
    entry, parent = given.entry, given.parent
    taken = np.flatnonzero(chosen)
    assert all(parent[node] < 0 or chosen[parent[node]] for node in taken), (
        "a node without its parent"
    )
    per_entry = np.bincount(entry[taken], minlength=len(given.caps))
    assert (per_entry <= given.caps - 1).all()
    roots = sum(depth > 0 for depth in given.depth)
    assert len(taken) + roots <= max(given.selection.budget_tokens, roots), "over the budget"


@given(drafted(), st.sampled_from([0, 1, 4, None]))
def test_needs_come_first_then_the_likeliest_and_ties_level_by_level(
    given: Drafted, different: int | None
) -> None:
    """The plain definition of Algorithm 2, node by node; mostly with probabilities of few values,
    so that many tie.
    """
    if different is not None:
        few = [round(chance * different) / (different or 1) for chance in given.path]
        given = dataclasses.replace(given, path=np.array(few))
    path = given.path
    selection, caps = given.selection, given.caps.tolist()
    likeliest = sorted(range(len(path)), key=lambda node: (-path[node], given.at[node]))
    own = [
        [node for node in likeliest if given.entry[node] == e][: caps[e] - 1]
        for e in range(len(caps))
    ]
    budget = max(0, selection.budget_tokens - sum(depth > 0 for depth in given.depth))
    taken = set[int]()
    needed = np.array(given.needed, dtype=np.float32).tolist()
    for e in sorted(range(len(caps)), key=lambda e: -needed[e]):
        expected = 1.0
        for node in own[e][: selection.needed_limit_tokens - 1]:
            if len(taken) == budget or expected >= min(needed[e], given.depth[e] + 1.0):
                break
            taken.add(node)
            expected += path[node]
    others = (node for node in likeliest if node not in taken and node in own[given.entry[node]])
    taken.update(islice(others, budget - len(taken)))
    assert set(np.flatnonzero(given.selected()).tolist()) == taken


# ---------------------------------------------------------------- chains before drafting


@dataclass(frozen=True)
class Chains:
    selection: Selection
    depth: list[int]
    caps: list[int]
    needed: list[float]

    def depths(self) -> list[int]:
        caps = np.array(self.caps, dtype=np.int32)
        depths: list[int] = depths_of(self.selection, caps, as_needs(self.needed)).tolist()
        return depths

    @property
    def most(self) -> list[int]:
        return [min(depth, cap - 1) for depth, cap in zip(self.depth, self.caps, strict=True)]

    @property
    def room(self) -> int:
        """The drafts that the budget has room for beside the roots."""
        return max(0, self.selection.budget_tokens - sum(most > 0 for most in self.most))


@st.composite
def chains(draw: st.DrawFn) -> Chains:
    entries = draw(st.integers(0, 6))
    depth = [draw(st.integers(0, 5)) for _ in range(entries)]
    selection = Selection(
        method=draw(st.sampled_from(sorted(METHODS))),
        depth=pack(depth),
        width=pack([draw(st.integers(1, 3)) for _ in range(entries)]),
        budget_tokens=draw(st.integers(0, 30)),
        needed_limit_tokens=draw(st.integers(1, 8)),
    )
    caps = [draw(st.integers(1, 7)) for _ in range(entries)]
    needed = [draw(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.25, 9.0])) for _ in range(entries)]
    return Chains(selection, depth, caps, needed)


@given(chains())
def test_a_budget_too_short_for_chains_goes_to_needs_first_then_level_by_level(
    given: Chains,
) -> None:
    """The definition, draft by draft."""
    most, room = given.most, given.room
    expected = [0] * len(most)
    limit = given.selection.needed_limit_tokens - 1
    for e in sorted(range(len(most)), key=lambda e: -given.needed[e]):
        while 1 + expected[e] < given.needed[e] and expected[e] < min(most[e], limit) and room:
            expected[e], room = expected[e] + 1, room - 1
    for level in range(1, 6):
        for e in range(len(most)):
            if expected[e] < level <= most[e] and room:
                expected[e], room = expected[e] + 1, room - 1
    assert given.depths() == expected


def test_an_unknown_method_is_refused_by_name() -> None:
    selection = Selection(method="guess", depth=b"", width=b"", budget_tokens=0)
    with pytest.raises(PeerError, match="guess") as error:
        select(selection, np.zeros(0, dtype=np.int32), as_needs([]), grid([], [], []))
    assert all(name in str(error.value) for name in METHODS)


def test_drafting_costs_the_lacking_positions_then_a_step_for_each_level() -> None:
    """Two entries of depth 2 and 1 whose draft KV lacks nothing but the newest token: a step of
    both, then one of the deeper.
    """
    draft = Draft(Linear(), 1.0, 1.0)
    columns = [np.array(c, dtype=np.int32) for c in ([2, 1], [1, 1], [10, 20], [1, 1])]
    total_s = drafting_s(draft, *columns)
    assert total_s > drafting_s(draft, *(column[1:] for column in columns)) > 0
    assert drafting_s(draft, *(column[:0] for column in columns)) == 0.0


def drafting_s(draft: Draft, depth: Ints, width: Ints, context: Ints, missing: Ints) -> float:
    return draft_s(draft, depth=depth, width=width, context=context, missing=missing)
