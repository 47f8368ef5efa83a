"""Tests of prefill and decode apart in virtual time: KV that moves between replicas over links."""

import math
from collections.abc import Sequence

import pytest

from loadgen.load.mix import PlannedRequest
from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.moves import Moves
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.timeline import Timeline
from loadgen.simulator.traffic import Traffic
from shared.errors import ConfigError
from shared.prefix import CHAIN_TOKENS
from shared.rules.tiers import DEMO_3, Tier, TierSet
from shared.schemas import Announce
from shared.vocabulary import ReplicaId, RequestKey, Role, Slo
from tests.loadgen import planned

PROFILE = "a100-llama3-8b"
CHUNK = 512  # tokens
PREFILL, DECODE, BOTH, AUTO = Role.PREFILL, Role.DECODE, Role.BOTH, Role.AUTO
APART = (PREFILL, DECODE)
GBIT_S = 25.0
TOKEN_S = 8 * 131_072 / 25e9  # for the KV of a token of Llama-3-8B over that link
ROOMY = ReplicaFacts(max_slots=256)
TIGHT = ReplicaFacts(kv_blocks=1100, max_slots=64)


def run(
    requests: list[PlannedRequest],
    policy: str = "fcfs",
    roles: Sequence[Role] = APART,
    link_gbit_s: float = GBIT_S,
    *,
    replicas: int = 2,
    facts: ReplicaFacts = ROOMY,
    leaps: bool = True,
    tiers: TierSet = DEMO_3,
) -> SimulationResult:
    settings = {"chunk_tokens": str(CHUNK)} if policy == "fcfs" else {}
    deployment = Deployment(
        policy,
        PROFILE,
        replicas,
        settings,
        facts=facts,
        draft=0.0,
        roles=roles,
        link_gbit_s=link_gbit_s,
    )
    options = RunOptions(keep_times=True, check_every=25, leaps=leaps)
    return simulate(Traffic(requests, tiers), deployment, options)


def times_of(result: SimulationResult, n: int = 0) -> list[float]:
    assert result.token_unix_s is not None
    return list(result.token_unix_s[n])


def test_a_request_goes_on_elsewhere_once_the_kv_of_its_last_chunk_has_come() -> None:
    prompt = 8 * CHUNK
    requests = [planned.one(0, prompt, 20, "interactive")]
    apart, together = run(requests), run(requests, roles=())
    verdict = apart.verdicts[0]
    assert verdict is not None
    assert (verdict.replica, verdict.attempts, verdict.output_tokens) == ("r02", 2, 20)
    first_s, second_s, third_s, *_ = times_of(apart)
    assert first_s == pytest.approx(times_of(together)[0])
    step_s = third_s - second_s
    # all but the last chunk moved while the prompt was computed; then comes an iteration
    assert CHUNK * TOKEN_S <= second_s - first_s <= CHUNK * TOKEN_S + 2 * step_s
    assert prompt * TOKEN_S > CHUNK * TOKEN_S + 2 * step_s


def test_kv_that_would_come_later_than_computing_it_again_takes_is_not_waited_for() -> None:
    requests = [planned.one(0, 8 * CHUNK, 20, "interactive")]
    slow, together = run(requests, link_gbit_s=0.5), run(requests, roles=())
    first_s, second_s, *_ = times_of(slow)
    computing_s = times_of(together)[0]
    assert 3 * computing_s < 8 * CHUNK * 50 * TOKEN_S
    assert second_s - first_s < 2.2 * computing_s


class Link:
    """Moves, and what has come to those who wait."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.moves = Moves(self.timeline)
        self.come: dict[RequestKey, tuple[float, int]] = {}

    def wait(self, key: RequestKey, most_s: float = 100.0) -> None:
        self.moves.wait(key, most_s, lambda n: self.come.update({key: (self.timeline.now_s, n)}))

    def run(self) -> None:
        while self.timeline.next_s < math.inf:
            self.timeline.step()


HASH_S = CHAIN_TOKENS * 0.001
A, B, C, D = (RequestKey(f"tenant.{n}") for n in range(4))


def test_kv_waits_for_its_turn_on_both_links() -> None:
    link = Link()
    for key, source, target in ((A, "p1", "d1"), (B, "p1", "d2"), (C, "p2", "d2"), (D, "p3", "d3")):
        link.moves.begin(key, ReplicaId(source), announced(target), 0)
        link.moves.computed(key, ReplicaId(source), 10)
        link.wait(key)
    link.run()
    assert [n for _, n in link.come.values()] == [10] * 4
    # B behind A at its sender, C behind B at its receiver
    turns = {key: at_s / (10 * HASH_S) for key, (at_s, _) in link.come.items()}
    assert turns == pytest.approx({A: 1, B: 2, C: 3, D: 1})


def test_what_has_come_in_time_counts_and_the_rest_takes_no_link_any_more() -> None:
    link, source = Link(), ReplicaId("p1")
    for key in (A, B):
        link.moves.begin(key, source, announced("d1"), 4)
    link.moves.computed(A, source, 3)  # known there
    link.moves.computed(A, source, 6)
    link.moves.computed(A, source, 10)
    link.moves.computed(A, source, 100)
    link.moves.computed(B, source, 6)
    link.wait(A, most_s=5.0 * HASH_S)
    link.wait(B)
    link.run()
    assert link.come[A] == pytest.approx((5 * HASH_S, 6))
    assert link.come[B] == pytest.approx((8 * HASH_S, 6))  # behind what was on its way
    assert not link.moves.under_way(A, ReplicaId("d1"))


def announced(name: str) -> Announce:
    facts = {"profile": PROFILE, "engine": "virtual", "model": "m", "pool": "", "epoch": 0}
    sizes = {"kv_blocks": 100, "block_tokens": 16, "context_tokens": 1024, "max_slots": 8}
    return Announce(
        replica=ReplicaId(name), incarnation="1", at_unix_s=0.0, kv_move_s=0.001, **facts, **sizes
    )


@pytest.mark.parametrize("policy", ["fcfs", "qoserve", "slackline"])
@pytest.mark.parametrize(
    ("workload", "facts"), [("azure-conv", ROOMY), ("agent-loops", TIGHT)], ids=["roomy", "tight"]
)
def test_leaps_have_the_same_tokens_at_the_same_instants_where_kv_moves(
    policy: str, workload: str, facts: ReplicaFacts
) -> None:
    requests = planned.drawn(workload, 2.0 if facts is ROOMY else 0.3, 15.0, seed=3)
    for roles in (APART, (*APART, BOTH)):
        leapt, stepped = (
            run(requests, policy, roles, replicas=3, facts=facts, leaps=leaps)
            for leaps in (True, False)
        )
        assert sum(v is not None and v.attempts > 1 for v in leapt.verdicts) > 5, "few moved"
        assert leapt.token_unix_s is not None
        assert stepped.token_unix_s is not None
        for ours, theirs in zip(leapt.token_unix_s, stepped.token_unix_s, strict=True):
            assert list(ours) == pytest.approx(list(theirs), abs=1e-6)
        assert [v and (v.replica, v.attempts, v.cached_tokens) for v in leapt.verdicts] == [
            v and (v.replica, v.attempts, v.cached_tokens) for v in stepped.verdicts
        ]


@pytest.mark.parametrize("policy", ["fcfs", "slackline"])
def test_a_link_alone_changes_nothing(policy: str) -> None:
    requests = planned.drawn("azure-conv", 4.0, 15.0, seed=4)
    linked, plain = (run(requests, policy, (), link) for link in (GBIT_S, 0.0))
    assert linked.token_unix_s == plain.token_unix_s
    assert linked.verdicts == plain.verdicts


@pytest.mark.parametrize(
    ("roles", "link_gbit_s", "said"),
    [((*APART, DECODE), GBIT_S, "more roles"), (APART, 0.0, "link")],
)
def test_roles_that_the_replicas_cannot_have_are_refused(
    roles: Sequence[Role], link_gbit_s: float, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        run([planned.one(0, 100, 2, "interactive")], roles=roles, link_gbit_s=link_gbit_s)


@pytest.mark.parametrize(("lengths", "apart"), [((6000, 100), True), ((50, 400), False)])
def test_roles_that_are_not_fixed_follow_the_load(lengths: tuple[int, int], apart: bool) -> None:
    """Long prompts beside tight paces are computed apart, long answers are served together."""
    tight = TierSet(name="t", default="t", tiers={"t": Tier(slo=Slo(ttft_s=2.0, tbt_s=0.025))})
    requests = [planned.one(n, *lengths, "t", at_s=n * 0.25) for n in range(160)]
    found = run(requests, roles=[AUTO], link_gbit_s=100.0, replicas=4, tiers=tight)
    moved = sum(v is not None and v.attempts > 1 for v in found.verdicts)
    assert moved > 20 if apart else not moved
