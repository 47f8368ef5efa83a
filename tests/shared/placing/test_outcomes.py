"""Tests of the metrics of outcomes: a request that was offered is met, or is one violation."""

from collections import Counter

import pytest
from msgspec.structs import replace
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from shared.columns import pack
from shared.core.record.verdict import ended
from shared.measure import Measure
from shared.placing.outcomes import (
    KINDS,
    MODEL_LIMIT,
    NO_ROOM,
    RATE_LIMITED,
    TENANT_LIMIT,
    Outcomes,
)
from shared.rules.tiers import Tier
from shared.schemas import Record, Resume
from shared.telemetry import conventions as names
from shared.telemetry.exposition import exposition
from shared.telemetry.instruments import Registry
from shared.vocabulary import FinishReason, RequestKey, Slo
from tests import made

SLO = Slo(ttft_s=1.0, tbt_s=0.1, ttlt_s=20.0)
ARRIVED = 1000.0
NEW = made.record("t.1", owner="o", attempt=1, slo=SLO, arrived_unix_s=ARRIVED, max_tokens=100)
TIERS = {"chat": Tier(slo=SLO), "batch": Tier(slo=SLO)}
TRACED = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


def finished(
    *at_s: float, why: FinishReason = FinishReason.LENGTH, now_s: float = 0.0, **more: object
) -> Record:
    """A request whose tokens came at these times after its arrival."""
    record = replace(NEW, **more)
    measure = Measure.begin(SLO, ARRIVED)
    for seconds in at_s:
        measure = measure.emit(1, ARRIVED + seconds, SLO)
    resume = Resume(tokens=pack([1] * len(at_s)), measure=measure)
    return ended(record, why, resume, ARRIVED + now_s)


class Counted:
    """The counts of some outcomes."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.outcomes = Outcomes(self.registry, lambda: ["m"], lambda: TIERS)

    def values(self, name: str, *labels: str) -> Counter[tuple[str, ...]]:
        """The samples of this name that are not 0, by these labels."""
        accept = "application/openmetrics-text"
        counts = Counter[tuple[str, ...]]()
        for family in text_string_to_metric_families(exposition([self.registry], accept)[1]):
            for sample in family.samples:
                if sample.name == name:
                    key = tuple(sample.labels[label] for label in labels)
                    counts[key] += sample.value  # type: ignore[assignment]
        return +counts


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (finished(0.5, 0.6, 0.7), ""),
        (finished(1.5, 1.6), "ttft"),
        (finished(0.5, 0.6, 5.0), "tbt"),
        (finished(0.9, 25.0), "ttlt"),
        (finished(why=FinishReason.FAILED, now_s=3.0), "unfinished"),
        (finished(why=FinishReason.EXPIRED, now_s=3.0), "unfinished"),
        (finished(why=FinishReason.REFUSED, now_s=0.1), "unfinished"),
        # its client left when it was late
        (finished(why=FinishReason.CANCELLED, now_s=1.5), "ttft"),
        (finished(0.5, why=FinishReason.CANCELLED, now_s=2.0), "tbt"),
    ],
)
def test_what_was_offered_is_met_or_one_violation_of_its_kind(record: Record, kind: str) -> None:
    counted = Counted()
    counted.outcomes.ended(record)
    assert counted.values(names.OFFERED, "tier") == {("chat",): 1}
    assert counted.values(names.SLO_VIOLATIONS, "tier", "type") == (
        {("chat", kind): 1} if kind else {}
    )
    good = {} if kind else {("chat",): 1}
    assert counted.values(names.GOODPUT_REQUESTS, "tier") == good
    assert counted.values(names.GOODPUT_TOKENS, "tier") == dict.fromkeys(good, 3)


@pytest.mark.parametrize(
    "record",
    [
        finished(why=FinishReason.INVALID, now_s=0.1),
        finished(why=FinishReason.CANCELLED, now_s=0.5),  # nothing was late yet
        finished(0.5, why=FinishReason.CANCELLED, now_s=0.6),
    ],
)
def test_what_no_engine_could_serve_or_its_client_gave_up_in_time_was_not_offered(
    record: Record,
) -> None:
    counted = Counted()
    counted.outcomes.ended(record)
    assert counted.values(names.OFFERED, "tier") == {}
    assert counted.values(names.SLO_VIOLATIONS, "tier") == {}
    assert sum(counted.values(names.REQUESTS, "tier").values()) == 1


def test_shedding_does_not_look_like_success() -> None:
    counted = Counted()
    counted.outcomes.ended(finished(0.5))
    for _ in range(3):
        counted.outcomes.refused("t", "chat", "slow_down")
    counted.outcomes.refused("t", "chat", "unknown_model")  # malformed: it asked for no place
    assert counted.values(names.OFFERED, "tier") == {("chat",): 4}
    assert counted.values(names.GOODPUT_REQUESTS, "tier") == {("chat",): 1}
    assert counted.values(names.SLO_VIOLATIONS, "tier", "type") == {("chat", "refused"): 3}
    assert counted.values(names.REFUSALS, "tier", "code") == {
        ("chat", "slow_down"): 3,
        ("chat", "unknown_model"): 1,
    }


def test_a_tenant_over_its_own_limit_is_no_violation_of_the_fleet() -> None:
    counted = Counted()
    counted.outcomes.refused("t", "chat", RATE_LIMITED)
    assert sum(counted.values(names.OFFERED, "tier").values()) == 0
    assert sum(counted.values(names.SLO_VIOLATIONS, "tier").values()) == 0
    assert counted.values(names.REFUSALS, "tier", "code") == {("chat", RATE_LIMITED): 1}
    assert counted.values(names.TENANT_REQUESTS, "tenant", "verdict") == {("t", "limited"): 1}


def test_names_that_clients_choose_take_bounded_room() -> None:
    counted = Counted()
    for n in range(3 * TENANT_LIMIT):
        counted.outcomes.refused(f"t{n}", f"tier{n}", "slow_down")
        counted.outcomes.ended(finished(0.5, key=RequestKey(f"u{n}.1"), relegated=True))
    assert counted.values(names.REFUSALS, "tier") == {("other",): 3 * TENANT_LIMIT}
    for name in (names.TENANT_REQUESTS, names.TENANT_RELEGATIONS):
        tenants = counted.values(name, "tenant")
        assert len(tenants) <= TENANT_LIMIT + 1
        assert tenants["other",] > 0


def test_every_tier_is_there_from_the_start() -> None:
    """The rate of a counter that was not there before it was 1 is 0."""
    counted = Counted()
    _, text = exposition([counted.registry], "")
    for tier in ("chat", "batch"):
        at = f'model_name="m",tier="{tier}"'
        for kind in KINDS:
            assert f'{names.SLO_VIOLATIONS}{{type="{kind}",{at}}} 0' in text
        assert f"{names.OFFERED}{{{at}}} 0" in text


def test_hops_and_vllms_names_count_each_end_and_show_kept_traces_alone() -> None:
    counted = Counted()
    counted.outcomes.ended(finished(0.5, 0.6, 0.7, attempt=3, traceparent=TRACED))
    counted.outcomes.ended(finished(0.5, 0.6, traceparent=TRACED[:-2] + "00"))  # not sampled
    counted.outcomes.ended(finished(why=FinishReason.CANCELLED, now_s=0.1))
    assert counted.values(f"{names.HOPS}_sum", "tier") == {("chat",): 2}
    assert counted.values(names.REQUEST_SUCCESS, "model_name", "finished_reason") == {
        ("m", "length"): 2,
        ("m", "abort"): 1,
    }
    for name in (names.E2E_LATENCY, names.TIME_TO_FIRST_TOKEN, names.TIME_PER_OUTPUT_TOKEN):
        assert counted.values(f"{name}_count", "model_name", "tier") == {("m", "chat"): 2}
    assert counted.values(f"{names.REQUEST_GENERATION_TOKENS}_sum", "model_name") == {("m",): 5}
    _, text = exposition([counted.registry], "application/openmetrics-text")
    assert text.count("ab" * 16) == 4  # TTFT, TPOT, TTLT, end to end
    assert text.count("trace_id") == 4


def test_tokens_count_by_tenant_and_a_prompt_without_an_answer_costs_nothing() -> None:
    counted = Counted()
    counted.outcomes.ended(finished(0.5, 0.6, prompt_tokens=40))
    counted.outcomes.ended(finished(0.5, why=FinishReason.CANCELLED, now_s=0.6, prompt_tokens=7))
    counted.outcomes.ended(finished(why=FinishReason.EXPIRED, now_s=9.0, prompt_tokens=500))
    assert counted.values(names.TENANT_PROMPT_TOKENS, "tenant") == {("t",): 47}
    assert counted.values(names.TENANT_OUTPUT_TOKENS, "tenant") == {("t",): 3}


def test_the_objective_of_a_tier_is_shown_as_it_is_now() -> None:
    registry, tiers = Registry(), {"chat": Tier(slo=SLO, objective=0.95)}
    Outcomes(registry, lambda: ["m"], lambda: tiers)
    assert f'{names.TIER_OBJECTIVE}{{tier="chat"}} 0.95' in exposition([registry], "")[1]
    tiers["chat"] = Tier(slo=SLO)  # as a change of the file makes it
    assert f'{names.TIER_OBJECTIVE}{{tier="chat"}} 0.99' in exposition([registry], "")[1]


def test_what_became_of_requests_is_counted_by_their_model() -> None:
    """A request that was refused before it was read is of the only model, if there is one."""
    registry, models = Registry(), ["a", "b"]
    outcomes = Outcomes(registry, lambda: models, lambda: TIERS)
    outcomes.ended(finished(0.5, 0.6, model="b"))
    outcomes.refused("t", "chat", NO_ROOM, replace(NEW, model="a"))
    outcomes.refused("t", "chat", NO_ROOM)
    models.remove("b")
    outcomes.refused("t", "chat", NO_ROOM)
    _, text = exposition([registry], "")
    offered = [
        line for line in text.splitlines() if line.startswith(names.OFFERED) and "chat" in line
    ]
    counts = {line.split('"')[1]: line.split()[-1] for line in offered}
    assert counts == {"a": "2", "b": "1", "": "1"}


def test_models_that_workers_announce_take_bounded_room() -> None:
    registry, models = Registry(), [f"m{n:02}" for n in range(100)]
    outcomes = Outcomes(registry, lambda: models, lambda: {"chat": Tier(slo=SLO)})
    for model in models:
        outcomes.ended(finished(0.5, 0.6, model=model))
    _, text = exposition([registry], "")
    counts = [line for line in text.splitlines() if line.startswith(f"{names.E2E_LATENCY}_count")]
    assert len(counts) == MODEL_LIMIT + 1
