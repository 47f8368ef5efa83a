"""Tests of features that not every engine has: requests that need them are refused or routed."""

from random import Random
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from services.admission.intake import reading as intake
from services.admission.intake.required_features import Wanted, required_features
from services.admission.workers import Workers
from shared import features
from shared.columns import pack
from shared.core.admission.admission import (
    AdmissionCore,
    AdmissionSettings,
    Heard,
    Opened,
    Place,
    Relegate,
)
from shared.core.record.record import ENGINE_DIED
from shared.core.relegation.relegation import Heard as Surplus
from shared.core.relegation.relegation import Listed, RelegationCore, RelegationSettings
from shared.core.relegation.relegation import Place as HandOut
from shared.core.tick import Tick
from shared.errors import PeerError
from shared.features import ALL, needs
from shared.routing.routings import named
from shared.rules.model_names import ModelNames
from shared.rules.tiers import DEFAULT
from shared.schemas import Announce, Body, GenerateRequest, Record, Sampling
from shared.structured import Choice, Grammar, JsonObject, JsonSchema, Regex
from shared.telemetry.instruments import Registry
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import RecordState
from tests import made
from tests.shared.core.relegation.test_relegation import digest, record

# ---------------------------------------------------------------- the vocabulary

OUTSIDE = [
    {"min_p": -0.1}, {"min_p": 1.1}, {"min_tokens": -1}, {"presence_penalty": 2.1},
    {"frequency_penalty": -2.1},
    {"repetition_penalty": 0}, {"repetition_penalty": 101}, {"logit_bias": {"1": 101}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": {str(n): 1 for n in range(301)}}, {"structured": {"type": "xml"}},
    {"structured": {"type": "regex"}},
    {"structured": {"type": "regex", "pattern": "a" * 8193}},
    {"structured": {"type": "choice", "options": []}},
    {"structured": {"type": "choice", "options": ["a"] * 257}},
    {"structured": {"type": "json_object", "schema": "{}"}},
    {"structured": {"type": "grammar", "ebnf": "x" * 65_537}},
    {"structured": {"type": "json_schema", "schema": ""}},
]  # fmt: skip


@pytest.mark.parametrize("wrong", OUTSIDE, ids=lambda wrong: str(wrong)[:40])
def test_parameters_outside_their_bounds_are_not_decoded(wrong: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError, match=next(iter(wrong))):
        msgspec.json.decode(msgspec.json.encode(wrong), type=Sampling)


@pytest.mark.parametrize(
    "structured",
    [
        JsonSchema(schema="{}"),
        JsonObject(),
        Regex(pattern="a+"),
        Choice(options=["a", "b"]),
        Grammar(ebnf='root ::= "a"'),
    ],
)
def test_parameters_survive_both_encodings_and_neutral_ones_cost_nothing(structured: Any) -> None:
    sampling = Sampling(
        min_p=0.5,
        min_tokens=3,
        presence_penalty=1.0,
        logit_bias={7: -100.0, 2: 1.5},
        structured=structured,
    )
    for codec in (msgspec.json, msgspec.msgpack):
        assert codec.decode(codec.encode(sampling), type=Sampling) == sampling
    assert msgspec.json.encode(Sampling()) == b"{}"


NEEDS: list[tuple[Sampling, set[str]]] = [
    (
        Sampling(
            temperature=0.3,
            top_p=0.5,
            top_k=4,
            seed=1,
            stop=["a"],
            stop_token_ids=[1],
            ignore_eos=True,
        ),
        set(),
    ),
    (Sampling(logprobs=0), {features.LOGPROBS}),
    (Sampling(presence_penalty=0.1), {features.PENALTIES}),
    (Sampling(frequency_penalty=0.1, repetition_penalty=1.1), {features.PENALTIES}),
    (Sampling(min_p=0.1, min_tokens=1), {features.MIN_P, features.MIN_TOKENS}),
    (Sampling(logit_bias={1: 0.0}), {features.LOGIT_BIAS}),
    (Sampling(structured=JsonObject()), {features.STRUCTURED}),
]


def test_a_request_needs_what_it_asks_for_beyond_the_neutral_and_no_more() -> None:
    for sampling, needed in NEEDS:
        assert needs(sampling) == needed
        assert needs(sampling, "poet") == needed | {"adapter:poet"}
    assert set().union(*(needed for _, needed in NEEDS)) == ALL


# ---------------------------------------------------------------- refusals


NO_NAMES = ModelNames()


class At:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def unix_s(self) -> float:
        return self.now


def worker(
    replica: str,
    engine: str = "sim",
    able: frozenset[str] = frozenset(),
    adapters: tuple[str, ...] = (),
) -> Announce:
    return made.announce(
        replica, engine=engine, profile="p", features=sorted(able), adapters=list(adapters)
    )


def listening(*announced: Announce, for_s: float) -> tuple[Workers, At]:
    """Admission's list of workers after listening `for_s`, and the clock, which a test moves."""
    clock = At()
    workers = Workers(clock, 3.0, Registry())  # type: ignore[arg-type]
    clock.now += for_s
    for announce in announced:
        workers.received(announce)
    return workers, clock


def asked(model: str | None = None, adapter: str = "", **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="a",
        tenant="t",
        prompt="x",
        model=model,
        adapter=adapter,
        sampling=Sampling(**sampling),
    )


def refused(request: GenerateRequest, workers: Workers) -> tuple[str, str | None, str]:
    with pytest.raises(PeerError) as caught:
        required_features(request, workers, (), NO_NAMES)
    return caught.value.code, caught.value.param, caught.value.message


def test_what_no_replica_has_is_refused_with_the_parameter_and_the_engines_there_are() -> None:
    workers, _ = listening(worker("a"), worker("b", "torch", ALL - {features.STRUCTURED}), for_s=10)
    code, param, message = refused(asked(structured=JsonObject()), workers)
    assert (code, param) == ("unsupported_parameter", "structured")
    assert "structured output" in message
    assert "sim, torch" in message
    assert required_features(asked(min_p=0.1), workers, (), NO_NAMES) == Wanted("", ("min_p",), "m")
    assert required_features(asked(), workers, (), NO_NAMES) == Wanted("", (), "m")


def test_what_only_different_replicas_have_is_refused_together() -> None:
    workers, _ = listening(
        worker("a", "torch", frozenset({"min_p"})),
        worker("b", "vllm", frozenset({"logit_bias"})),
        for_s=10,
    )
    assert refused(asked(min_p=0.1, logit_bias={1: 1.0}), workers)[0] == "unsupported_parameter"
    assert required_features(asked(min_p=0.1), workers, (), NO_NAMES) is not None


@pytest.mark.parametrize(
    "request_",
    [asked(min_p=0.1), asked(logprobs=0), asked("poet"), asked(adapter="poet"), asked("m")],
)
def test_before_every_worker_can_have_been_heard_nothing_is_refused(
    request_: GenerateRequest,
) -> None:
    workers, clock = listening(for_s=0)
    assert required_features(request_, workers, (), NO_NAMES) is None
    if request_.model != "m":
        workers.received(worker("a"))
        assert required_features(request_, workers, (), NO_NAMES) is None
    workers.received(worker("b", "vllm", ALL, ("poet",)))
    assert required_features(request_, workers, (), NO_NAMES) is not None
    clock.now += 4.0
    assert (
        refused(request_, workers)[0] == "server_is_overloaded"
        if request_.model != "m"
        else required_features(request_, workers, (), NO_NAMES)
    )


def test_what_a_replica_had_that_is_away_may_be_asked_for_again() -> None:
    workers, clock = listening(worker("a", "vllm", ALL, ("poet",)), for_s=10)
    clock.now += 4.0
    workers.received(worker("b"))
    assert refused(asked(min_p=0.1), workers)[:2] == ("server_is_overloaded", "min_p")
    assert refused(asked("poet"), workers)[:2] == ("server_is_overloaded", "adapter")
    assert refused(asked("someone else"), workers)[:2] == ("model_not_found", "model")


def test_a_model_may_be_the_name_of_an_adapter_of_any_replica() -> None:
    workers, _ = listening(worker("a"), worker("b", "vllm", adapters=("poet",)), for_s=10)
    for request in (
        asked("poet"),
        asked(adapter="poet"),
        asked("m", "poet"),
        asked("poet", "poet"),
    ):
        assert required_features(request, workers, (), NO_NAMES) == Wanted(
            "poet", ("adapter:poet",), "m"
        )
    assert required_features(asked("m"), workers, (), NO_NAMES) == Wanted("", (), "m")
    assert refused(asked("gpt"), workers)[:2] == ("model_not_found", "model")
    assert refused(asked(adapter="painter"), workers)[:2] == ("model_not_found", "adapter")
    assert refused(asked("gpt", "poet"), workers)[:2] == ("invalid_request_error", "adapter")


def of_models(*models: str, adapters: tuple[str, ...] = ()) -> Workers:
    announced = (
        made.announce(f"r{n}", model=model, adapters=list(adapters))
        for n, model in enumerate(models)
    )
    return listening(*announced, for_s=10)[0]


def test_a_request_that_names_no_model_means_the_default_one() -> None:
    workers = of_models("a", "b")
    names = ModelNames(default="best", aliases={"best": "b", "verse": "poet"})
    chosen = required_features(asked(), workers, (), names)
    assert chosen is not None and chosen.model == "b"
    assert required_features(asked("a"), workers, (), names) == Wanted("", (), "a")
    with pytest.raises(PeerError, match="unknown model `c`") as unknown:
        required_features(asked(), workers, (), ModelNames(default="c"))
    assert unknown.value.code == "model_not_found"


def test_an_adapter_of_two_models_needs_the_model_too() -> None:
    workers, names = of_models("a", "b", adapters=("poet",)), ModelNames(aliases={"verse": "poet"})
    for asking in (asked("poet"), asked("verse"), asked(adapter="poet")):
        with pytest.raises(PeerError, match="`a`, `b` have an adapter `poet`"):
            required_features(asking, workers, (), names)
    chosen = required_features(asked("b", "poet"), workers, (), names)
    assert chosen == Wanted("poet", ("adapter:poet",), "b")


def test_a_model_that_admission_was_told_of_may_yet_come() -> None:
    """Its workers load it still. One that nobody was told of is unknown."""
    workers, ours = of_models("a"), ("a", "b")
    with pytest.raises(PeerError, match="no replica is there now, of `b`: ask again") as awaited:
        required_features(asked("b"), workers, ours, NO_NAMES)
    assert awaited.value.code == "server_is_overloaded"
    with pytest.raises(PeerError, match="name one of `a`, `b`"):
        required_features(asked(), workers, ours, NO_NAMES)
    with pytest.raises(PeerError, match="unknown model `c`"):
        required_features(asked("c"), workers, ours, NO_NAMES)


INCOHERENT: list[tuple[dict[str, Any], str]] = [
    ({"min_tokens": 11, "max_tokens": 10}, "min_tokens"),
    ({"structured": JsonObject(), "ignore_eos": True}, "ignore_eos"),
    ({"structured": JsonSchema(schema="{")}, "structured"),
    ({"structured": JsonSchema(schema="[]")}, "structured"),
]


@pytest.mark.parametrize(("sampling", "param"), INCOHERENT)
def test_parameters_that_contradict_each_other_are_refused(
    sampling: dict[str, Any], param: str
) -> None:
    with pytest.raises(PeerError) as caught:
        intake.check(asked(**sampling), "chat", DEFAULT)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("sampling", "param"),
    [({"logit_bias": {300: 1.0}}, "logit_bias"), ({"stop_token_ids": [-1]}, "stop_token_ids")],
)
def test_tokens_that_the_model_does_not_have_are_refused(
    sampling: dict[str, Any], param: str
) -> None:
    with pytest.raises(PeerError) as caught:
        intake.tokenise(asked(**sampling), Tokenizer.builtin(), None)
    assert caught.value.param == param


# ---------------------------------------------------------------- routing

NOW = 1000.0
ABLE = {"features": ["min_p", "penalties"], "adapters": ["poet"]}


def opened(key: str, *needed: str, **more: Any) -> Record:
    return replace(record(key, ttft_s=1e6), state=RecordState.ACTIVE, needs=needed, **more)


def places(core: AdmissionCore, event: Any, at_s: float = 0.0) -> list[Any]:
    return core.handle(event, now_unix_s=NOW + at_s)


def mixed(**settings: Any) -> AdmissionCore:
    core = AdmissionCore(named("attainable"), Random(1), AdmissionSettings(**settings))
    for name, can in (("idle", {}), ("able", ABLE), ("torch", {"features": ["min_p"]})):
        places(core, Heard(digest(0.0, name, **can)))
    return core


def test_a_request_whose_only_replica_is_away_waits_for_it() -> None:
    core = mixed(homeless_s=10.0)
    assert places(core, Opened(opened("t.a", "adapter:painter"))) == []
    (action,) = places(core, Heard(digest(5.0, "new", adapters=["painter"])), 5.0)
    assert isinstance(action, Place)
    assert action.replica == "new"
    in_vain = mixed(homeless_s=10.0)
    assert places(in_vain, Opened(opened("t.a", "adapter:painter"))) == []
    (action,) = places(in_vain, Tick(), 10.1)
    assert isinstance(action, Relegate)


def test_the_pool_hands_a_replica_the_first_of_those_whose_needs_it_meets() -> None:
    waiting = [
        record("a.1", importance=3.0, needs=("adapter:poet",)),
        record("b.1", importance=2.0, needs=("min_p",)),
        record("c.1", importance=1.0), record("d.1", importance=0.5, needs=("min_p",)),
    ]  # fmt: skip
    core = RelegationCore(RelegationSettings(per_digest=2))
    core.handle(Listed(waiting), now_unix_s=NOW)

    def handed(at_s: float, replica: str, **can: Any) -> list[str]:
        actions = core.handle(Surplus(digest(at_s, replica, **can)), now_unix_s=NOW + at_s)
        return [action.key for action in actions if isinstance(action, HandOut)]

    assert handed(1.0, "plain") == ["c.1"]
    assert handed(1.1, "plain") == []
    assert handed(1.2, "torch", features=["min_p"]) == ["b.1", "d.1"]
    assert handed(1.3, "able", **ABLE) == ["a.1"]


# ---------------------------------------------------------------- the way to the engine


def test_what_an_engine_computes_as_it_dies_is_over_and_the_rest_stays_held() -> None:
    core, body = made.worker_core(), Body(prompt=pack([1, 2, 3]), sampling=Sampling())
    for slot, refused in enumerate(("", "", "no such format")):
        placed = opened(f"t.{slot}", replica=core.replica, incarnation=core.incarnation)
        made.hold(core, slot, placed, body, refused=refused)
    ended = core.between()
    assert ended is not None
    (invalid,) = ended.overs
    assert (invalid.key, invalid.why, invalid.message) == ("t.2", "invalid", "no such format")
    plan = made.plan([1], [3], predicted_s=0.1)
    assert core.plan(plan) is None
    assert core.begin(now_unix_s=0.0) is not None
    (died,) = core.break_off().overs
    assert (died.key, died.why) == ("t.1", ENGINE_DIED)
    assert [entry.offer.key for entry in core.entries()] == ["t.0"]
    core.check()


def test_the_engine_gets_the_adapter_and_the_parameters() -> None:
    core = made.worker_core()
    sampling = Sampling(min_p=0.5, structured=JsonObject())
    body = Body(prompt=pack([1, 2, 3]), sampling=sampling, adapter="poet")
    placed = opened("t.a", "adapter:poet", replica=core.replica, incarnation=core.incarnation)
    made.hold(core, 3, placed, body)
    plan = made.plan([3], [3], predicted_s=0.1)
    assert core.plan(plan) is None
    turn = core.begin(now_unix_s=0.0)
    assert turn is not None
    assert [(load.slot, load.adapter, load.sampling) for load in turn.loads] == [
        (3, "poet", sampling)
    ]
    assert [entry.offer.needs for entry in core.entries()] == [("adapter:poet",)]
