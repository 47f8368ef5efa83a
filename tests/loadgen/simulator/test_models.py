"""Tests of simulated fleets with several models: their replicas share nothing but the services."""

from collections.abc import Sequence

import pytest

from loadgen.load.mix import PlannedRequest, with_models
from loadgen.simulator.deployment import Deployment, ServedModel
from loadgen.simulator.simulation import RunOptions, SimulationResult, simulate
from loadgen.simulator.traffic import Traffic
from shared.errors import ConfigError
from shared.rules.tiers import Tier, TierSet
from shared.schemas import Verdict
from shared.vocabulary import Slo
from tests.loadgen.cli.command import printed, refused
from tests.loadgen.planned import drawn, one

MODELS = (ServedModel("small", "h100-llama3-8b"), ServedModel("large", "a100-llama3-70b-tp4"))
TIERS = TierSet(
    name="t",
    default="chat",
    tiers={"chat": Tier(slo=Slo(ttft_s=1.0, tbt_s=0.1), models={"large": Slo(ttft_x=4.0)})},
)


def requests() -> list[PlannedRequest]:
    planned = drawn("chatbot", 4.0, 30.0, tiers=TIERS)
    return with_models(planned, {"small": 2.0, "large": 1.0}, seed=1)


def run(
    planned: list[PlannedRequest], policy: str, models: tuple[ServedModel, ...]
) -> SimulationResult:
    ordered = sorted(planned, key=lambda request: request.arrival_s)
    deployment = Deployment(policy, models[0].profile, models=models, draft=0.0)
    return simulate(Traffic(ordered, TIERS), deployment, RunOptions(check_every=500))


@pytest.mark.parametrize("policy", ["fcfs", "slackline"])
def test_each_model_is_served_as_if_the_other_were_not_there(policy: str) -> None:
    planned = requests()
    together = run(planned, policy, MODELS)
    # at the end of each run, so that every request has the same `max_tokens` in both
    longest = max(planned, key=lambda request: request.output_tokens)
    for model in MODELS:
        part = [request for request in planned if request.model == model.name]
        assert 20 < len(part) < len(planned)
        most = longest._replace(model=model.name, number=100_000, arrival_s=1e5)
        alone = run([*part, most], policy, (model,))
        mine = [
            verdict
            for request, verdict in zip(planned, together.verdicts, strict=True)
            if request.model == model.name
        ]
        assert times(mine) == pytest.approx(times(alone.verdicts[:-1]))


def times(verdicts: Sequence[Verdict | None]) -> list[float | None]:
    """The times of these requests to their first token, then those to their last."""
    ended = [verdict for verdict in verdicts if verdict is not None]
    assert len(ended) == len(verdicts)
    return [each.ttft_s for each in ended] + [each.ttlt_s for each in ended]


def test_a_tiers_multiples_are_those_of_the_model() -> None:
    planned = [
        one(n, 1000, 10, "chat", at_s=n)._replace(model=m.name) for n, m in enumerate(MODELS)
    ]
    small, large = run(planned, "fcfs", MODELS).slos
    assert small.ttft_s == 1.0
    assert large.tbt_s is None
    assert large.ttft_s is not None and 0.1 < large.ttft_s < 2.0


def test_a_command_tells_the_models_apart(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("simulate", "--workload", "chatbot", "--rate", "2", "--duration", "20", "--seed", "1")
    two = ("--model", "small=h100-llama3-8b", "--model", "large=a100-llama3-70b-tp4,2,3")
    found = printed(capsys, *words, *two)
    offered = {name: group["offered"] for name, group in found["by_model"].items()}
    assert sum(offered.values()) == found["offered"]
    assert offered["large"] > offered["small"] > 0
    assert found["replicas"] == 3
    assert "by_model" not in printed(capsys, *words)
    assert "NAME=PROFILE" in refused(capsys, *words, "--model", "small")
    assert "no-such" in refused(capsys, *words, "--model", "a=no-such")


def test_a_recorded_model_that_the_fleet_does_not_have_is_told() -> None:
    planned = [one(0, 10, 10, "chat")._replace(model="else")]
    with pytest.raises(ConfigError, match="`else`; there are small"):
        with_models(planned, {"small": 1.0}, seed=1)
