"""Tests of the acceptance model, which decides the drafts that a simulated engine accepts: it is
calibrated, and no schedule changes it. Also tests a simulated replica that speculates.
"""

from collections.abc import Sequence
from functools import partial
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.cli.main import main
from loadgen.load.arrivals import Gaps, draw_arrivals
from loadgen.load.mix import PlannedRequest, plan_requests
from loadgen.load.workload import named_workload
from loadgen.simulator.deployment import ACCEPTANCE, Deployment, ReplicaFacts
from loadgen.simulator.latency import LATENCIES
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.columns import Ints, pack
from shared.core import announced
from shared.errors import ConfigError
from shared.perf.draft import DRAFT, Draft, DraftCost
from shared.policy import registry, sarathi
from shared.policy.acceptance import Acceptance, Drafted, Seeds, Speculated, speculate
from shared.policy.speculation import draft_s
from shared.rules.tiers import DEMO_3
from shared.schemas import Announce, Selection
from tests import made
from tests.shared.policy.speculating import CHAIN, TREE, Speculating
from tests.shared.policy.views import Linear

PROFILE = "a100-llama3-8b"


def columns(
    rng: Random, entries: int, most_depth: int = 5, most_width: int = 4
) -> tuple[Seeds, Ints, Ints, Ints]:
    """Seeds, tokens made, depth, width."""
    seeds = np.array([rng.getrandbits(64) for _ in range(entries)], dtype=np.uint64)
    made, depth, width = (
        np.array([rng.randint(least, most) for _ in range(entries)], dtype=np.int32)
        for least, most in ((1, 2000), (0, most_depth), (1, most_width))
    )
    return seeds, made, depth, width


Tree = list[list[tuple[float, bool]]]  # path probability, on the true path; by level and beam


def tree(drafted: Drafted, entry: int) -> Tree:
    """The tree of one entry."""
    nodes, true = drafted.candidates, drafted.true
    assert not (true & ~nodes.there).any()
    return [
        [
            (float(nodes.path[level, entry, beam]), bool(true[level, entry, beam]))
            for beam in np.flatnonzero(nodes.there[level, entry]).tolist()
        ]
        for level in range(int(nodes.depth[entry]))
    ]


def beam_search(model: Acceptance, seed: np.uint64, made: int, depth: int, width: int) -> Tree:
    """The plain definition: every extension of every beam, and of them the likeliest."""
    positions = np.arange(made, made + depth, dtype=np.uint64)
    level, levels = [(1.0, True)], list[list[tuple[float, bool]]]()
    for (top,), (wanted,) in zip(*model.drawn(np.array([seed]), positions[:, None]), strict=True):
        chances = top * np.array([1.0 - top] * width) ** np.arange(width)
        level = sorted(
            (
                (path * float(chance), true and rank == wanted)
                for path, true in level
                for rank, chance in enumerate(chances)
            ),
            key=lambda node: -node[0],
        )[:width]
        levels.append(level)
    return levels


# ---------------------------------------------------------------- the model


@pytest.mark.parametrize("probability", [0.3, 0.7, 0.9])
def test_a_node_is_accepted_with_its_path_probability_and_the_first_draft_with_the_mean_asked_for(
    probability: float,
) -> None:
    rng, entries = Random(5), 20_000
    seeds, made, *_ = columns(rng, entries)
    drafted = Acceptance(probability).draft(
        seeds, made, np.full(entries, 3, np.int32), np.full(entries, 3, np.int32)
    )
    nodes, true = drafted.candidates, drafted.true
    assert nodes.there.all()
    # a tree's first node is its likeliest first draft
    assert true[0, :, 0].mean() == pytest.approx(probability, abs=0.012)
    assert nodes.path[0, :, 0].mean() == pytest.approx(probability, abs=0.012)
    for low in np.arange(0.0, 1.0, 0.1):
        here = (nodes.path >= low) & (nodes.path < low + 0.1)
        if (count := int(here.sum())) > 500:
            expected = float(nodes.path[here].mean())
            assert true[here].mean() == pytest.approx(
                expected, abs=4.5 * (expected * (1 - expected) / count) ** 0.5 + 1e-3
            )


@given(
    st.integers(0, 1 << 32),
    st.sampled_from([0.2, 0.7, 1.0]),  # the last: most extensions tie at probability 0
)
def test_a_tree_is_the_likeliest_extensions_level_by_level_and_one_of_each_level_at_most_is_true(
    seed: int, probability: float
) -> None:
    rng, model = Random(seed), Acceptance(probability)
    seeds, made, depth, width = columns(rng, rng.randint(1, 12), most_width=6)
    drafted = model.draft(seeds, made, depth, width)
    for entry, (deep, wide) in enumerate(zip(depth.tolist(), width.tolist(), strict=True)):
        found = tree(drafted, entry)
        assert found == beam_search(model, seeds[entry], int(made[entry]), deep, wide)
        assert [len(level) for level in found] == [wide] * deep
        assert all(sum(true for _, true in level) <= 1 for level in found)


@pytest.mark.parametrize("probability", [0.0, -0.1, 1.1, float("nan")])
def test_an_impossible_acceptance_is_refused(probability: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        Acceptance(probability)


def test_an_engine_of_chains_verifies_as_many_drafts_as_budget_and_needs_say() -> None:
    """Three decodes and a prefill; the plan wants trees, and has a budget for four drafts. All are
    accepted.
    """
    draft = Draft(Linear(), 0.1, 0.1)
    selection = Selection(
        method="slo_then_throughput",
        depth=pack([3, 3, 3, 3]),
        width=pack([2, 2, 2, 2]),
        budget_tokens=7,
    )

    def did(longest_chain: int) -> Speculated:
        return speculate(
            draft,
            partial(Acceptance(1.0).draft, np.arange(4, dtype=np.uint64)),
            selection,
            np.array([7, 7, 7, 5], dtype=np.int32),
            needed=np.array([0.0, 2.0, 4.0, 9.0], dtype=np.float32),
            made=np.array([4, 4, 4, 0], dtype=np.int32),
            has=np.array([10, 20, 30, 0], dtype=np.int32),
            depth=np.array([3, 3, 3, 0], dtype=np.int32),
            filled=np.array([0, 20, 30, 0], dtype=np.int32),
            longest_chain=longest_chain,
        )

    chains = did(5)
    assert chains.drafted.tolist() == [0, 1, 3, 0]
    assert chains.fills.tolist() == chains.kept.tolist() == [1, 2, 4, 5]
    assert chains.filled.tolist() == [0, 22, 34, 0], "a request without drafts was read"
    # both draft as deep as the deeper one
    depth, width, context, missing = np.array([[3, 3], [1, 1], [21, 31], [1, 1]], dtype=np.int32)
    columns = {"depth": depth, "width": width, "context": context, "missing": missing}
    assert chains.drafted_s == draft_s(draft, **columns)
    assert did(2).drafted.tolist() == [1, 1, 2, 0]
    assert did(0).drafted_s > chains.drafted_s, "trees cost what chains cost"


def test_a_planner_takes_the_draft_from_the_announcement_and_refuses_an_impossible_one() -> None:
    announce = made.announce(incarnation="1", profile=PROFILE, context_tokens=1600)
    assert announced.draft_of(announce) is None
    for cost, step, read in ((0.1, 0.1, 0.1), ((0.1, 0.02), 0.1, 0.02)):
        told = msgspec.structs.replace(announce, draft=cost)
        told = msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=Announce)
        assert announced.draft_of(told) == Draft(announced.profile_of(announce), step, read)
    with pytest.raises(ConfigError, match="fraction"):
        announced.draft_of(msgspec.structs.replace(announce, draft=2.0))


# ---------------------------------------------------------------- a replica that speculates


@pytest.fixture
def speculating(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, object]]:
    """Policies by these names speculate."""
    made = {"chain": dict(CHAIN), "tree": dict(TREE)}
    for name, words in made.items():
        entry = registry.Entry(sarathi.Settings, lambda _, words=words: Speculating(**words))
        monkeypatch.setitem(registry.POLICIES, name, entry)
    return made


def drawn(rate: float, duration_s: float, seed: int) -> list[PlannedRequest]:
    arrivals = draw_arrivals(Gaps(), rate, duration_s, seed, ((1.0, 1.0),))
    return plan_requests(arrivals, named_workload("sharegpt", 8192), DEMO_3, seed, important=0.3)


ROOMY = ReplicaFacts()


def run(
    requests: Sequence[PlannedRequest],
    policy: str,
    latency: str = "none",
    *,
    facts: ReplicaFacts = ROOMY,
    draft: DraftCost = DRAFT,
    acceptance: float = ACCEPTANCE,
    check_every: int = 0,
    leaps: bool = True,
) -> SimulationResult:
    deployment = Deployment(
        policy, PROFILE, latency=LATENCIES[latency], facts=facts, draft=draft, acceptance=acceptance
    )
    options = RunOptions(keep_times=True, check_every=check_every, leaps=leaps)
    return simulate(Traffic(requests, DEMO_3), deployment, options)


@pytest.mark.parametrize("latency", LATENCIES)
@pytest.mark.parametrize("policy", ["chain", "tree"])
@pytest.mark.usefixtures("speculating")
def test_every_request_has_just_its_tokens_and_the_books_balance_also_where_kv_is_scarce(
    policy: str, latency: str
) -> None:
    requests = drawn(1.5, 8.0, seed=11)
    result = run(
        requests,
        policy,
        latency,
        facts=ReplicaFacts(kv_blocks=500, max_slots=24, context_tokens=8000),
        check_every=1,
    )
    assert [v and v.output_tokens for v in result.verdicts] == [r.output_tokens for r in requests]
    assert result.token_unix_s is not None
    assert all(list(times) == sorted(times) for times in result.token_unix_s)
    assert result.preempted > 0, "KV was never short"
    assert result.mispredicted_entries == 0, "accepted drafts are progress, no surprise"
    assert 0 < result.accepted < result.drafted
    assert result.tokens == sum(r.output_tokens for r in requests)


def test_a_policy_learns_what_was_drafted_and_what_of_it_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = Speculating(**TREE)
    entry = registry.Entry(sarathi.Settings, lambda _: policy)
    monkeypatch.setitem(registry.POLICIES, "tree", entry)
    result = run(drawn(1.5, 10.0, seed=11), "tree", "live")
    # Entries of requests that ended in that very step count, too: they were still in the table.
    assert sum(int(drafts.drafted.sum()) for drafts in policy.drafts) == result.drafted
    assert sum(int(drafts.accepted.sum()) for drafts in policy.drafts) == result.accepted
    assert sum(len(drafts.drafted) for drafts in policy.drafts) == result.verifications


@pytest.mark.parametrize(
    "words",
    [
        ["--draft", "-1"],
        ["--draft", "2"],
        ["--draft", "nan"],
        ["--draft", "0.05,2"],
        ["--draft", "0.05,0.01,0.01"],
        ["--draft", "some"],
        ["--acceptance", "0"],
        ["--acceptance", "1.5"],
    ],
)
@pytest.mark.parametrize(
    "command", [["simulate", "--workload", "mix", "--rate", "1"], ["up", "--engine", "sim"]]
)
def test_impossible_numbers_are_refused_in_one_line(
    command: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, *words]) == 2
    error = capsys.readouterr().err.strip()
    assert words[0] in error
    assert len(error.splitlines()) == 1
