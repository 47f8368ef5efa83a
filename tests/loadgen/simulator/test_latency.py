"""Tests of the simulator's control latency: it is drawn by seed, no message overtakes another of
its sender, and nothing is drawn where control takes no time.
"""

import statistics
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.simulator.deployment import Deployment, ReplicaFacts
from loadgen.simulator.latency import Hop, Latency, Route
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.timeline import Timeline
from loadgen.simulator.traffic import Traffic
from shared.policy import registry
from shared.rules.tiers import DEMO_3
from shared.vocabulary import FinishReason
from tests.loadgen.planned import drawn
from tests.rings import slow_but

LIVE = Latency.live()


def run(
    latency: Latency, seed: int = 1, policy: str = "qoserve", check_every: int = 0
) -> SimulationResult:
    facts = ReplicaFacts(kv_blocks=2000, max_slots=24)
    deployment = Deployment(policy, "a100-llama3-8b", 2, latency=latency, facts=facts)
    options = RunOptions(keep_times=True, check_every=check_every)
    traffic = Traffic(drawn("mix", 8.0, 10.0), DEMO_3, seed)
    return replace(simulate(traffic, deployment, options), wall_s=0.0)


def hops(latency: Latency, change: Callable[[Hop], Hop]) -> Latency:
    """This latency with each of its hops changed."""
    return Latency._make(change(field) if isinstance(field, Hop) else field for field in latency)


def test_half_of_the_draws_are_above_the_median_and_one_in_a_hundred_above_the_percentile() -> None:
    hop, rng = Hop(0.002, 4.0), Random(1)
    each_s = [hop.draw_s(rng) for _ in range(20_000)]
    assert statistics.median(each_s) == pytest.approx(0.002, rel=0.02)
    assert statistics.quantiles(each_s, n=100)[98] == pytest.approx(0.008, rel=0.05)


def test_the_same_seed_draws_the_same() -> None:
    each_s = [[LIVE.ack.draw_s(rng) for _ in range(5)] for rng in map(Random, (7, 7, 8))]
    assert each_s[0] == each_s[1] != each_s[2]


def test_the_seed_of_the_traffic_decides_the_latencies_of_a_run() -> None:
    one, again, other = run(LIVE), run(LIVE), run(LIVE, seed=2)
    assert one == again
    assert one.token_unix_s != other.token_unix_s


@given(st.lists(st.floats(0.0, 0.01), min_size=2, max_size=40), st.integers(0, 99))
def test_no_message_overtakes_one_sent_before_it(pauses_s: list[float], seed: int) -> None:
    timeline, received = Timeline(), list[int]()
    route = Route(timeline, Hop(0.005, 20.0), Random(seed))

    def send(n: int) -> None:
        at_s = route.send(received.append, n)
        assert at_s > timeline.now_s

    at_s = 0.0
    for n, pause_s in enumerate(pauses_s):
        at_s += pause_s
        timeline.at(at_s, send, n)
    while len(received) < len(pauses_s):
        timeline.step()
    assert received == list(range(len(pauses_s)))


@pytest.mark.parametrize("latency", [Latency.none(), LIVE.at_medians()], ids=["none", "medians"])
def test_without_latency_and_at_the_medians_nothing_is_drawn(
    latency: Latency, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> float:
        raise AssertionError("a latency was drawn")

    monkeypatch.setattr(Random, "gauss", refuse)
    run(latency)
    with pytest.raises(AssertionError, match="drawn"):
        run(LIVE)


@pytest.mark.parametrize("policy", slow_but(["qoserve"], registry.names()))
def test_with_tails_longer_than_an_iteration_every_request_ends_once_and_the_books_balance(
    policy: str,
) -> None:
    tails = hops(LIVE, lambda hop: hop._replace(p99_x=10.0))
    result = run(tails, policy=policy, check_every=7)
    assert {verdict and verdict.finish_reason for verdict in result.verdicts} == {FinishReason.STOP}
