"""Tests of simulations where engines are slower, or outputs longer, than planners expect."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from loadgen.simulator.deployment import Deployment, EngineFacts
from loadgen.simulator.misjudged import MisjudgedLengths
from loadgen.simulator.simulation import SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.perf.shape import BatchShape
from shared.policy import registry
from shared.policy.adaserve.policy import AdaServe
from shared.policy.seam import Choice, Ended, Observation, Policy, View
from shared.policy.slackline.policy import Slackline
from shared.policy.slos_serve.policy import SlosServe
from shared.policy.vllm import Vllm
from shared.rules.tiers import DEMO_3
from tests.loadgen.planned import drawn


def served(deployment: Deployment) -> SimulationResult:
    return simulate(Traffic(drawn("mix", 4.0, 10.0), DEMO_3, 1), deployment)


def test_slower_engines_are_busy_for_longer_and_every_request_ends() -> None:
    deployment = Deployment("slackline", "a100-llama3-8b", 2, draft=0.0)
    usual = served(deployment)
    slow = served(replace(deployment, engine_times=1.3))
    assert slow.busy_s > 1.1 * usual.busy_s
    assert all(verdict is not None for verdict in slow.verdicts)


def test_engines_take_what_they_are_whatever_profile_the_planners_know() -> None:
    known = Deployment("vllm", "a100-llama3-8b", settings={"spec_tokens": "3"}, draft=0.05)
    quick = served(known)
    of_a_cpu = served(replace(known, engine=EngineFacts("cpu-tiny", 0.05)))
    cpu = served(replace(known, profile="cpu-tiny"))
    alike = served(replace(known, engine=EngineFacts("a100-llama3-8b", 0.05)))
    dear = served(replace(known, engine=EngineFacts("a100-llama3-8b", 1.0)))
    assert alike.busy_s == quick.busy_s
    # this policy does not ask the profile, so only the engine counts
    assert of_a_cpu.busy_s == pytest.approx(cpu.busy_s, rel=0.05)
    assert abs(of_a_cpu.busy_s / quick.busy_s - 1) > 0.2
    assert dear.busy_s > 1.5 * quick.busy_s  # three drafts cost what a pass does


def test_an_engine_that_verifies_chains_verifies_no_trees() -> None:
    trees = Deployment("adaserve", "a100-llama3-8b", draft=0.05)
    alike = replace(trees, engine=EngineFacts("a100-llama3-8b", 0.05))
    of_trees = served(trees)
    assert of_trees.drafted > 2 * of_trees.verifications
    assert served(alike).drafted == of_trees.drafted
    chains = served(replace(trees, engine=EngineFacts("a100-llama3-8b", 0.05, longest_chain=1)))
    assert 0 < chains.accepted < chains.drafted == chains.verifications
    assert all(verdict is not None for verdict in chains.verdicts)


@pytest.mark.parametrize(
    ("policy", "settings", "deepest", "widest"),
    [
        (AdaServe, {}, 8, 3),
        (SlosServe, {"speculate": "paper"}, 3, 1),
        (Slackline, {}, 3, 1),
        (Vllm, {"spec_tokens": "5"}, 5, 1),
    ],
)
def test_a_policy_knows_that_an_engine_verifies_chains_alone_and_how_long_ones(
    policy: type[Policy],
    settings: Mapping[str, str],
    deepest: int,
    widest: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, seen = policy.plan, list[tuple[int, int, int]]()

    def noted(one: Policy, view: View) -> Sequence[Choice]:
        choices = plan(one, view)
        seen.extend(
            (view.longest_chain, int(trees.depth.max()), int(trees.width.max()))
            for choice in choices
            if (trees := choice.speculation) is not None
        )
        return choices

    monkeypatch.setattr(policy, "plan", noted)
    engine = EngineFacts("a100-llama3-8b", 0.05, longest_chain=2)
    known = Deployment(policy.name, "a100-llama3-8b", settings=settings, draft=0.05)
    served(known)
    chains, depths, widths = zip(*seen, strict=True)
    assert set(chains) == {0} and max(depths) >= deepest and max(widths) == widest
    seen.clear()
    served(replace(known, engine=engine))
    chains, depths, widths = zip(*seen, strict=True)
    assert set(chains) == {2} and max(depths) == 2 and max(widths) == 1


@pytest.mark.parametrize("times", [0.5, 2.0])
def test_a_policy_learns_from_outputs_so_many_times_as_long(times: float) -> None:
    class Recorder:
        name, declared = "recorder", registry.make("fcfs").declared
        admit = plan = None

        def observe(self, seen: Observation) -> None:
            self.seen = seen

    recorder = Recorder()
    policy = MisjudgedLengths(recorder, times)
    ended = [Ended("chat", 10, 100, 40)]
    policy.observe(Observation(0.0, BatchShape(), 0.0, 0.0, ended=ended))
    assert recorder.seen.ended == [Ended("chat", 10, 100, round(40 * times))]
