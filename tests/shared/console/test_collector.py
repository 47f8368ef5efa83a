"""Tests of the console's collector: it tells what the fleet's messages say, in bounded memory."""

import math
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given

from shared import schemas
from shared.columns import pack
from shared.console import collector as limits
from shared.console.collector import Collector
from shared.console.picture import TierPicture
from shared.rules.tiers import DEFAULT
from shared.schemas import Ended, RosterAnswer
from shared.vocabulary import ReplicaId, RequestKey, ServiceClass, Slo
from tests.generated import fuzzed, seeds, valid
from tests.shared.console.heard import NOW, R1, ack, announce, digest, ended, entry, held, plan


def tier_of(collector: Collector, name: str = "chat", at_s: float = 0.0) -> TierPicture:
    return next(t for t in collector.picture(NOW + at_s).tiers if t.name == name)


def planned() -> Collector:
    """A collector that has heard the digest of a replica."""
    collector = Collector(NOW)
    collector.hear_digest(digest(), NOW)
    return collector


def holding(*keys: str, **facts: Any) -> Collector:
    """A collector that has heard a replica take these requests into slots 0, 1, ... and their
    planner say who they are.
    """
    collector = planned()
    collector.hear_ack(ack(1, NOW, held=[held(n, key) for n, key in enumerate(keys)]), NOW)
    answer = RosterAnswer(entries=[entry(n, key, **facts) for n, key in enumerate(keys)])
    collector.hear_roster(R1, [], answer, NOW)
    return collector


def test_a_replica_is_shown_as_its_digest_and_its_heartbeat_say() -> None:
    collector = Collector(NOW)
    assert collector.picture(NOW).replicas == []
    collector.hear_announce(announce())
    assert collector.picture(NOW).replicas == []  # nobody plans for it yet
    collector.hear_digest(digest(), NOW)
    [replica] = collector.picture(NOW + 0.5).replicas
    assert (replica.waiting, replica.running, replica.best_effort) == (1, 2, 3)
    assert (replica.kv_blocks, replica.kv_free_blocks) == (100, 40)
    assert (replica.engine, replica.profile, replica.heard_s) == ("sim", "f", 0.5)


def test_replicas_are_in_their_natural_order_and_one_that_is_silent_for_long_is_dropped() -> None:
    collector = Collector(NOW)
    for name in ("r10", "r2", "a", "r1"):
        collector.hear_digest(digest(name), NOW)
    assert [r.name for r in collector.picture(NOW).replicas] == ["a", "r1", "r2", "r10"]
    collector.hear_digest(digest("r2"), NOW + limits.GONE_S)
    assert [r.name for r in collector.picture(NOW + limits.GONE_S + 1).replicas] == ["r2"]


def test_an_iteration_has_its_prefill_decodes_drafts_and_what_was_predicted() -> None:
    collector = planned()
    collector.hear_plan(plan(1, 0.015))
    # a chunk without a token, the last chunk of a prompt, a decode, a decode with two of three
    # drafts accepted
    did = {0: (100, 0), 1: (50, 1), 2: (1, 1), 3: (3, 3)}
    collector.hear_ack(ack(1, NOW, did, drafted=pack([0, 0, 0, 3]), idle_s=0.003), NOW)
    collector.hear_ack(ack(2, NOW + 0.02, {2: (1, 1)}), NOW + 0.02)
    [first, second] = collector.picture(NOW).replicas[0].iterations
    assert (first.prefill_tokens, first.decode_tokens, first.draft_tokens) == (150, 2, 3)
    assert (first.exec_s, first.predicted_s, first.idle_s) == (0.02, 0.015, 0.003)
    assert (second.decode_tokens, second.predicted_s) == (1, 0.0)  # its plan was not heard


@pytest.mark.parametrize("watched_s", [0.5, 1.5, 4.0, 12.0])
@pytest.mark.parametrize("exec_s", [0.004, 0.02, 0.1])  # the shortest: not all of them are kept
def test_rates_are_over_the_time_that_the_replica_was_watched(
    watched_s: float, exec_s: float
) -> None:
    collector = planned()
    for seq in range(1, round(watched_s / exec_s) + 1):
        at = NOW + seq * exec_s
        collector.hear_ack(ack(seq, at, {0: (1, 1), 1: (1, 1)}, exec_s=exec_s), at)
    [replica] = collector.picture(NOW + watched_s).replicas
    assert replica.busy == pytest.approx(1.0, abs=0.03)
    assert replica.tokens_s == pytest.approx(2 / exec_s, rel=0.03)
    [replica] = collector.picture(NOW + watched_s + 10.0).replicas
    assert (replica.busy, replica.tokens_s) == (0.0, 0.0)


def test_a_picture_has_only_the_iterations_that_were_not_told_before() -> None:
    collector = planned()
    for seq in range(1, 6):
        collector.hear_ack(ack(seq, NOW + seq, {0: (1, 1)}), NOW + seq)
    picture = collector.picture(NOW + 9, since=3)
    assert [i.n for i in picture.replicas[0].iterations] == [4, 5]
    assert collector.picture(NOW + 9, since=picture.newest).replicas[0].iterations == []


def test_slack_is_the_time_to_the_deadline_of_the_next_token() -> None:
    collector = holding("acme.a")  # TTFT 1 s, TBT 0.1 s
    [row] = collector.picture(NOW + 0.25).requests
    assert row.slack_s == pytest.approx(0.75)
    assert row.phase == "waiting"
    collector.hear_ack(ack(2, NOW + 0.5, {0: (10, 1)}), NOW + 0.5)
    [row] = collector.picture(NOW + 0.5).requests
    assert row.slack_s == pytest.approx(0.6)  # token 2 is due at 1.1
    assert row.phase == "decode"
    collector.hear_ack(ack(3, NOW + 0.6, {0: (1, 3)}), NOW + 0.6)
    [row] = collector.picture(NOW + 0.6).requests
    assert row.slack_s == pytest.approx(0.8)  # token 5 is due at 1.4
    [late] = collector.picture(NOW + 2.0).requests
    assert late.slack_s == pytest.approx(-0.6)


def test_tokens_that_came_before_the_planner_said_who_it_is_count_for_the_slack() -> None:
    collector = planned()
    collector.hear_ack(ack(1, NOW, held=[held(0, "acme.a")]), NOW)
    collector.hear_ack(ack(2, NOW + 0.2, {0: (10, 1)}), NOW + 0.2)
    collector.hear_ack(ack(3, NOW + 0.3, {0: (1, 1)}), NOW + 0.3)
    assert collector.picture(NOW + 0.3).requests == []  # its tier is not known yet
    # the planner predicts one token more than was acked
    answer = RosterAnswer(entries=[entry(0, "acme.a", generated_tokens=3)])
    collector.hear_roster(R1, [0], answer, NOW + 0.3)
    [row] = collector.picture(NOW + 0.3).requests
    assert row.generated_tokens == 2
    assert row.slack_s == pytest.approx(0.9)  # token 3 is due at 1.2


def test_a_request_that_ran_before_the_listening_began_is_shown_as_its_planner_says() -> None:
    collector = planned()
    running = entry(
        4, "acme.old", generated_tokens=50, computed_tokens=60, next_due_unix_s=NOW + 0.4
    )
    collector.hear_roster(R1, [], RosterAnswer(entries=[running]), NOW)
    [row] = collector.picture(NOW).requests
    assert (row.key, row.generated_tokens, row.phase) == ("acme.old", 50, "decode")
    assert row.slack_s == pytest.approx(0.4)
    life = collector.life(RequestKey("acme.old"), NOW)
    assert life is not None and not life.whole


def test_a_request_that_another_replica_declined_first_is_known_from_its_beginning() -> None:
    collector = planned()
    holds = [held(0, "acme.new", attempt=2), held(1, "acme.moved", attempt=2, offset=7)]
    collector.hear_ack(ack(1, NOW, held=holds), NOW)
    new, moved = (collector.life(RequestKey(f"acme.{name}"), NOW) for name in ("new", "moved"))
    assert new is not None and new.whole
    assert moved is not None and not moved.whole


def test_a_bound_on_the_last_token_is_slack_too_and_best_effort_has_none() -> None:
    collector = planned()
    entries = [
        entry(0, "a.ttlt", slo=Slo(ttlt_s=60.0), tier="batch", next_due_unix_s=math.inf),
        entry(1, "a.late", service_class=ServiceClass.BEST_EFFORT),
    ]
    collector.hear_roster(R1, [], RosterAnswer(entries=entries), NOW)
    rows = {row.key: row for row in collector.picture(NOW + 10).requests}
    assert rows[RequestKey("a.ttlt")].slack_s == pytest.approx(50.0)
    assert rows[RequestKey("a.late")].slack_s is None
    [replica] = collector.picture(NOW + 10).replicas
    assert sum(replica.slack) == 1  # the best-effort one is owed nothing


def test_attainment_counts_all_that_ended_and_those_refused_at_the_door() -> None:
    collector = Collector(NOW, DEFAULT)
    assert tier_of(collector).offered == 0
    for n in range(6):
        collector.hear_ended(ended(f"a.{n}", met=n < 4), NOW)
    collector.hear_ended(Ended(tier="chat"), NOW)
    chat = tier_of(collector)
    assert (chat.offered, chat.met, chat.missed) == (7, 4, {"ttft": 2, "refused": 1})
    assert chat.ttft.p50_s == pytest.approx(0.4, rel=0.05)
    assert chat.history[-1] == pytest.approx(4 / 7)
    assert tier_of(collector, at_s=400.0).offered == 0  # the window is over


def test_the_time_between_tokens_of_a_tier_is_that_of_every_gap() -> None:
    collector = holding("acme.a")
    for n in range(150):
        at = NOW + 0.5 + 0.03 * n + (0.3 if n == 149 else 0.0)
        collector.hear_ack(ack(n + 2, at, {0: (1, 1)}), at)
    tbt = tier_of(collector, at_s=6.0).tbt
    assert tbt.p50_s == pytest.approx(0.03, rel=0.05)
    assert tbt.p99_s == pytest.approx(0.03, rel=0.05)
    collector.hear_ack(ack(152, NOW + 7.0, {0: (1, 1)}), NOW + 7.0)
    assert (tier_of(collector, at_s=7.0).tbt.p99_s or 0.0) > 0.3


def test_the_life_of_a_request_has_its_chunks_its_tokens_and_its_end() -> None:
    collector = holding("acme.a")
    collector.hear_ack(ack(2, NOW + 0.1, {0: (6, 0)}), NOW + 0.1)
    collector.hear_ack(ack(3, NOW + 0.2, {0: (4, 1)}), NOW + 0.2)
    collector.hear_ack(ack(4, NOW + 0.3, {0: (1, 1)}, relegated=pack([0])), NOW + 0.3)
    life = collector.life(RequestKey("acme.a"), NOW + 0.4)
    assert life is not None and life.whole and life.best_effort
    assert [(round(at, 3), n) for at, n in life.chunks] == [(0.1, 6), (0.2, 4)]
    assert [(round(at, 3), n) for at, n in life.tokens] == [(0.2, 1), (0.3, 1)]
    collector.hear_ack(ack(5, NOW + 0.5, {}, ended=[(0, "stop")]), NOW + 0.5)
    collector.hear_ended(ended("acme.a", met=False), NOW + 0.5)
    assert collector.picture(NOW + 0.5).requests == []
    over = collector.life(RequestKey("acme.a"), NOW + 60)
    assert over is not None and (over.ended, over.slo_met, over.missed) == ("stop", False, "ttft")
    told = [what for _, what in msgspec.to_builtins(over.events)]
    assert told == ["held by r1, attempt 1", "relegated", "left r1: stop", "ended: stop"]


def test_a_request_that_moves_keeps_its_life() -> None:
    collector = holding("acme.a")
    collector.hear_digest(digest("r2"), NOW)
    collector.hear_ack(ack(2, NOW + 0.2, {0: (10, 1)}), NOW + 0.2)
    collector.hear_ack(ack(3, NOW + 0.3, ended=[(0, "offloaded")]), NOW + 0.3)
    moved = ack(1, NOW + 0.4, held=[held(7, "acme.a", attempt=2, offset=1)], replica="r2")
    collector.hear_ack(moved, NOW + 0.4)
    collector.hear_ack(ack(2, NOW + 0.6, {7: (11, 1)}, replica="r2"), NOW + 0.6)
    life = collector.life(RequestKey("acme.a"), NOW + 0.6)
    assert life is not None
    assert (life.replica, life.generated_tokens, len(life.tokens)) == ("r2", 2, 2)


def test_its_planner_is_asked_for_slots_that_are_not_known_and_now_and_then_for_all() -> None:
    collector = Collector(NOW)
    assert collector.questions(NOW) == []
    collector.hear_digest(digest(), NOW)
    assert collector.questions(NOW) == [(R1, [])]
    assert collector.questions(NOW + 0.01) == []
    collector.hear_ack(ack(1, NOW + 0.5, held=[held(3, "acme.a")]), NOW + 0.5)
    assert collector.questions(NOW + 0.5) == [(R1, [3])]
    collector.hear_roster(R1, [3], RosterAnswer(entries=[entry(3, "acme.a")]), NOW + 0.6)
    assert collector.questions(NOW + 1.0) == []
    collector.hear_digest(digest(), NOW + 11)
    assert collector.questions(NOW + 11) == [(R1, [])]
    # nobody answers for a replica that is silent
    assert collector.questions(NOW + 40) == []


def test_a_request_whose_end_was_not_heard_leaves_with_the_next_roster() -> None:
    collector = holding("acme.a", "acme.b")
    collector.hear_ack(ack(2, NOW + 9, {1: (1, 1)}), NOW + 9)
    collector.hear_roster(R1, [], RosterAnswer(entries=[entry(1, "acme.b")]), NOW + 10)
    assert [row.key for row in collector.picture(NOW + 10).requests] == ["acme.b"]


def test_it_stays_small_whatever_it_hears(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("HELD_LIMIT", 40), ("ENDED_LIMIT", 20), ("TIERS_LIMIT", 5)):
        monkeypatch.setattr(limits, name, value)
    collector = Collector(NOW, DEFAULT)
    collector.hear_digest(digest(), NOW)
    taken = [held(n, f"acme.{n}") for n in range(100)]
    collector.hear_ack(ack(1, NOW, held=taken), NOW)
    collector.hear_roster(
        R1, [], RosterAnswer(entries=[entry(n, f"acme.{n}") for n in range(100)]), NOW
    )
    for n in range(200):
        collector.hear_ended(ended(f"other.{n}", tier=f"tier-{n}"), NOW)
    picture = collector.picture(NOW)
    assert picture.held == 40
    assert len(picture.tiers) == 6  # the last one is `other`
    assert collector.life(RequestKey("other.0"), NOW) is None
    assert collector.life(RequestKey("other.199"), NOW) is not None


HEARD: list[Any] = [
    schemas.Digest, schemas.Announce, schemas.BatchPlan, schemas.PlanAck, schemas.Ended,
    schemas.PoolDigest, schemas.RosterAnswer,
]  # fmt: skip


@fuzzed
@given(rng=seeds)
def test_no_message_that_can_be_decoded_breaks_it(rng: Random) -> None:
    collector, at = Collector(NOW), NOW
    for _ in range(30):
        kind = rng.choice(HEARD)
        try:
            message = msgspec.convert(valid(kind, rng), kind, builtin_types=(bytes,))
        except (msgspec.ValidationError, ValueError):
            continue
        at += rng.random()
        match message:
            case schemas.Digest():
                collector.hear_digest(message, at)
            case schemas.Announce():
                collector.hear_announce(message)
            case schemas.BatchPlan():
                collector.hear_plan(message)
            case schemas.PlanAck():
                collector.hear_ack(message, at)
            case schemas.Ended():
                collector.hear_ended(message, at)
            case schemas.PoolDigest():
                collector.hear_pool(message)
            case schemas.RosterAnswer():
                for replica in list(collector._replicas)[:3]:
                    collector.hear_roster(replica, [], message, at)
    msgspec.json.encode(collector.picture(at))
    for key in [*collector._lives, *collector._ended]:
        msgspec.json.encode(collector.life(key, at))
    assert all(isinstance(slots, list) for _, slots in collector.questions(at))


def test_columns_that_do_not_fit_say_nothing() -> None:
    collector = planned()
    collector.hear_ack(msgspec.structs.replace(ack(1, NOW, {0: (1, 1)}), computed=b"abc"), NOW)
    assert collector.picture(NOW).replicas[0].iterations == []


def test_a_replica_that_nobody_announced_answers_no_roster() -> None:
    collector = Collector(NOW)
    collector.hear_roster(ReplicaId("ghost"), [], RosterAnswer(entries=[entry(0, "a.b")]), NOW)
    assert collector.picture(NOW).requests == []


def test_the_replicas_needed_are_shown_while_somebody_tells_them() -> None:
    collector = Collector(NOW)
    needed = schemas.ReplicasNeeded(
        model="m", at_unix_s=NOW, replicas=3, tier="chat", why="chat comes", tiers=[], serving=2,
        ahead_s=120.0,
    )  # fmt: skip
    collector.hear_needed(needed)
    assert collector.picture(NOW + limits.FRESH_NEED_S).needed == [needed]
    assert collector.picture(NOW + limits.FRESH_NEED_S + 1.0).needed == []
