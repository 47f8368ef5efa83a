"""Tests of requests that go on elsewhere with their KV, in the planner's core and in records."""

from typing import Any

import pytest
from msgspec.structs import replace

from shared.columns import unpack_list
from shared.core.offer import as_offer
from shared.core.record import record as life
from shared.core.record.record import Apart
from shared.core.replica.events import HoldDone, Offered, ReplicaAction, SendHold, SendPlan, Synced
from shared.core.replica.replica import ReplicaCore
from shared.core.tick import Tick
from shared.measure import Measure
from shared.perf import profile_file as profiles
from shared.policy import registry
from shared.schemas import (
    AttemptOver,
    BatchPlan,
    Hold,
    KvAt,
    OfferAccepted,
    Record,
    Resume,
    ResyncEntry,
)
from shared.vocabulary import HANDED_OVER, FinishReason, ReplicaId, ServiceClass, Slo
from tests import made

NOW = 1000.0
PROMPT = 1000
PROFILE = "a100-llama3-8b"


def core(*held: ResyncEntry, **facts: Any) -> ReplicaCore:
    """A planner's core whose worker holds these. The first plan, with a whole prompt, has left."""
    found = ReplicaCore(
        registry.make("fcfs", {"chunk_tokens": "4096"}), profiles.load(PROFILE), epoch=1
    )
    announced = made.announce(context_tokens=10_000, kv_blocks=1000, **facts)
    found.handle(Synced(announced, 1, 1, 0, held), now_unix_s=NOW)
    return found


def entry(**offer: Any) -> ResyncEntry:
    asked = made.offer(prompt_tokens=PROMPT, max_tokens=100, slo=Slo(ttft_s=5.0), **offer)
    return ResyncEntry(slot=0, offer=asked, computed_tokens=0, generated_tokens=0)


def plans(core: ReplicaCore, until: int) -> list[BatchPlan]:
    """Its plans of the next `until` ms, while no ack comes."""
    found = []
    for ms in range(until):
        actions = core.handle(Tick(), now_unix_s=NOW + ms / 1000)
        found += [action.plan for action in actions if isinstance(action, SendPlan)]
    return found


def test_a_request_that_goes_on_elsewhere_is_planned_until_its_first_token() -> None:
    assert plans(core(entry(then=ReplicaId("d"))), until=400) == []
    [plan] = plans(core(entry()), until=400)
    assert unpack_list(plan.slots) == [0] and unpack_list(plan.caps) == [1]


@pytest.mark.parametrize("slo", [Slo(ttft_s=1.0, tbt_s=0.001), Slo(ttlt_s=5.0)])
def test_a_replica_that_computes_prompts_promises_first_tokens_and_no_pace(slo: Slo) -> None:
    """No replica keeps a pace of a millisecond; where a request goes on, that is decided anew."""
    asked = replace(entry().offer, slo=slo, next_due_unix_s=NOW + 1.0, arrived_unix_s=NOW)
    seen: list[int] = []
    for then in (None, ReplicaId("d")):
        found = ReplicaCore(registry.make("slackline", {}), profiles.load(PROFILE), epoch=1)
        announced = made.announce(context_tokens=10_000, kv_blocks=1000)
        found.handle(Synced(announced, 1, 1, 0, ()), now_unix_s=NOW)
        seen.append(len(holds(found.handle(Offered([replace(asked, then=then)]), now_unix_s=NOW))))
    assert seen == ([0, 1] if slo.tbt_s else [1, 1])


def asked(**facts: Any) -> tuple[ReplicaCore, Hold]:
    """A core that was offered a request whose KV is at `p`, and its hold."""
    planner = core(**facts)
    offer = replace(entry().offer, kv_at=ReplicaId("p"), kv_tokens=PROMPT, generated_tokens=1)
    [hold] = holds(planner.handle(Offered([offer]), now_unix_s=NOW))
    return planner, hold


def holds(actions: list[ReplicaAction]) -> list[Hold]:
    return [action.hold for action in actions if isinstance(action, SendHold)]


@pytest.mark.parametrize(
    ("facts", "fetches"),
    [
        ({"kv_move_s": 1e-6}, True),
        ({"kv_move_s": 1e-3}, False),  # computing a token takes a tenth of that
        ({"kv_move_s": 0.0}, False),
        ({"kv_move_s": 1e-6, "replica": ReplicaId("p")}, False),  # it is here already
    ],
)
def test_kv_is_fetched_where_that_is_sooner_than_to_compute_it(
    facts: dict[str, Any], fetches: bool
) -> None:
    assert (asked(**facts)[1].fetch_s > 0.0) is fetches


@pytest.mark.parametrize("came", [PROMPT, 640, 0])
def test_what_came_is_not_computed_again(came: int) -> None:
    planner, hold = asked(kv_move_s=1e-6)
    planner.handle(HoldDone(hold.slot, OfferAccepted(kv_tokens=came)), now_unix_s=NOW)
    plan = plans(planner, until=1)[0]
    assert sum(unpack_list(plan.caps)) == PROMPT + 1 - came // 16 * 16


# ---------------------------------------------------------------- the record


def at_p(**more: Any) -> Record:
    placed = life.placed(
        made.record(**more), "a", ReplicaId("p"), "i", attempt=0, apart=Apart(ReplicaId("d"), "h:1")
    )
    assert placed is not None
    return placed


def over(record: Record, why: str = HANDED_OVER) -> AttemptOver:
    made_one = Resume(
        tokens=b"\1\0\0\0", measure=Measure.begin(record.slo, 0.0).emit(1, 0.5, record.slo)
    )
    return AttemptOver(
        key=record.key, attempt=record.attempt, replica=ReplicaId("p"), incarnation="i", why=why,
        relegated=False, service_class=record.service_class, resume=made_one,
        kv=KvAt(replica=ReplicaId("p"), address="h:1", tokens=10),
    )  # fmt: skip


def test_the_record_names_both_places_until_the_request_is_at_the_second() -> None:
    record = at_p()
    assert (record.replica, record.then) == ("p", "d")
    assert record.kv == KvAt(replica=ReplicaId("p"), address="h:1", tokens=0)
    waiting = life.settled(record, over(record), "a", 1.0)
    assert waiting is not None and (waiting.replica, waiting.then) == (None, "d")
    offer = as_offer(waiting, ServiceClass.STANDARD)
    assert (offer.kv_at, offer.kv_tokens, offer.generated_tokens) == ("p", 10, 1)
    placed = life.placed(waiting, "a", ReplicaId("d"), "i", attempt=1)
    assert placed is not None and placed.then is None and placed.kv == waiting.kv


def test_a_handed_over_request_that_had_all_its_tokens_has_ended() -> None:
    record = at_p(max_tokens=1)
    ended = life.settled(record, over(record), "a", 1.0)
    assert ended is not None and ended.verdict is not None
    assert ended.verdict.finish_reason is FinishReason.LENGTH


def test_a_place_that_declined_is_no_source_of_kv() -> None:
    placed = life.placed(at_p(), "a", ReplicaId("q"), "i", attempt=1)
    assert placed is not None and (placed.then, placed.kv) == (None, None)
