"""Which drafts are verified: within budget and caps, connected, the neediest first ([adaserve] Algorithm 2)."""

from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.columns import Ints, pack
from shared.errors import PeerError
from shared.policy.speculation import METHODS, Candidates, draft_s, select
from shared.schemas import Selection
from tests.views import Linear


@dataclass(frozen=True)
class Drafted:
    selection: Selection
    caps: Ints
    candidates: Candidates
    needed: list[float]
    depth: list[int]


@st.composite
def drafted(draw: st.DrawFn) -> Drafted:
    """Trees as a draft makes them: level by level, each node's path probability below its parent's."""
    rng = Random(draw(st.integers(0, 1 << 32)))
    entries = draw(st.integers(1, 6))
    depth = [draw(st.integers(0, 4)) for _ in range(entries)]
    width = [draw(st.integers(1, 4)) for _ in range(entries)]
    entry, parent, path = list[int](), list[int](), list[float]()
    for e in range(entries):
        level = [(-1, 1.0)]
        for _ in range(depth[e]):
            below = []
            for _ in range(width[e]):
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
        needed=np.array(needed, dtype="<f4").tobytes(),
        budget_tokens=draw(st.integers(0, 40)),
        needed_limit_tokens=draw(st.integers(1, 8)),
    )
    caps = np.array([draw(st.integers(1, 8)) for _ in range(entries)], dtype=np.int32)
    nodes = Candidates(np.array(entry, dtype=np.int32), np.array(parent, dtype=np.int32), np.array(path, dtype=np.float64))
    return Drafted(selection, caps, nodes, needed, depth)


@settings(deadline=None, max_examples=300)
@given(drafted())
def test_a_selection_is_connected_within_the_budget_and_within_every_cap(given: Drafted) -> None:
    chosen = select(given.selection, given.caps, given.candidates)
    entry, parent = given.candidates.entry, given.candidates.parent
    taken = np.flatnonzero(chosen)
    assert all(parent[node] < 0 or chosen[parent[node]] for node in taken), "a node without its parent"
    per_entry = np.bincount(entry[taken], minlength=len(given.caps))
    assert (per_entry <= given.caps - 1).all()
    roots = sum(depth > 0 for depth in given.depth)
    assert len(taken) + roots <= max(given.selection.budget_tokens, roots), "over the budget"


@settings(deadline=None, max_examples=300)
@given(drafted())
def test_no_budget_is_left_while_a_node_could_still_be_taken(given: Drafted) -> None:
    """The throughput phase spends what is left: only caps stop it."""
    chosen = select(given.selection, given.caps, given.candidates)
    roots = sum(depth > 0 for depth in given.depth)
    left = given.selection.budget_tokens - roots - int(chosen.sum())
    per_entry = np.bincount(given.candidates.entry[chosen], minlength=len(given.caps))
    full = per_entry >= given.caps - 1
    assert left <= 0 or all(full[entry] for entry in given.candidates.entry[~chosen])


@settings(deadline=None, max_examples=300)
@given(drafted())
def test_whoever_needs_more_is_served_before_throughput_is(given: Drafted) -> None:
    """The neediest entry reaches min(needed, depth + 1) expected tokens unless its cap, its limit, its drafts or the budget end first."""
    selection, caps, candidates = given.selection, given.caps, given.candidates
    neediest = int(np.argmax(np.array(given.needed, dtype=np.float32)))
    mine = candidates.entry == neediest
    chosen = select(selection, caps, candidates)
    expected = 1.0 + float(candidates.path[mine & chosen].sum())
    enough = min(given.needed[neediest], given.depth[neediest] + 1.0)
    roots = sum(depth > 0 for depth in given.depth)
    allowed = min(int(caps[neediest]) - 1, selection.needed_limit_tokens - 1, max(0, selection.budget_tokens - roots), int(mine.sum()))
    assert expected >= enough - 1e-9 or int((mine & chosen).sum()) >= allowed


def test_a_chain_takes_the_first_drafts_of_each_entry() -> None:
    entry = np.array([0, 0, 0, 1, 1], dtype=np.int32)
    parent = np.array([-1, 0, 1, -1, 3], dtype=np.int32)
    nodes = Candidates(entry, parent, np.full(5, 0.5))
    zeros = np.zeros(2, dtype="<f4").tobytes()
    selection = Selection(method="chain", depth=pack([2, 5]), width=pack([1, 1]), needed=zeros, budget_tokens=99)
    assert select(selection, np.array([9, 2], dtype=np.int32), nodes).tolist() == [True, True, False, True, False]


def test_an_unknown_method_is_refused_by_name() -> None:
    nodes = Candidates(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32), np.zeros(0))
    selection = Selection(method="guess", depth=b"", width=b"", needed=b"", budget_tokens=0)
    with pytest.raises(PeerError, match="guess") as error:
        select(selection, np.zeros(0, dtype=np.int32), nodes)
    assert all(name in str(error.value) for name in METHODS)


def test_drafting_costs_the_lacking_positions_then_a_step_for_each_level() -> None:
    """Two entries of depth 2 and 1 whose draft KV lacks nothing but the newest token: a step of both, then one of the deeper."""
    profile = Linear()
    columns = [np.array(c, dtype=np.int32) for c in ([2, 1], [1, 1], [10, 20], [1, 1])]
    total_s = draft_s(profile, depth=columns[0], width=columns[1], context=columns[2], missing=columns[3])
    alone_s = draft_s(profile, depth=columns[0][1:], width=columns[1][1:], context=columns[2][1:], missing=columns[3][1:])
    assert total_s > alone_s > 0
    none = np.zeros(0, dtype=np.int32)
    assert draft_s(profile, depth=none, width=none, context=none, missing=none) == 0.0
