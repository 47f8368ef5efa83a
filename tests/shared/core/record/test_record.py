"""Tests of a request's record: what every event does in every state, and along every life."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shared.columns import pack
from shared.core.record import record as life
from shared.core.record.states import LIFE, Event, State, state_of
from shared.core.record.verdict import ended
from shared.measure import Measure
from shared.schemas import AttemptOver, Record, Resume
from shared.vocabulary import FinishReason, RecordState, ReplicaId, ServiceClass, Slo
from tests import made

NOW = 1000.0
OWNER, OTHER = "admission-1", "admission-2"
HERE, THERE = ReplicaId("gpu0"), ReplicaId("gpu1")
LIMIT = 3
MADE = Resume(tokens=pack([7, 8]), text="ab", measure=Measure(tokens=2, last_unix_s=NOW))
ROOT = Path(__file__).parents[4]
DOCS = ROOT / "docs/architecture.md"
CHANGING = {
    "state",
    "owner",
    "attempt",
    "verdict",
    "cancelled",
    "lost",
    "engines_died",
    "left",
    "output_key",
}

NEW = made.record(
    "t.1",
    body_key="t.1.0",
    owner=OWNER,
    slo=Slo(ttft_s=1.0, tbt_s=0.1),
    application="chat",
    arrived_unix_s=NOW,
    expires_unix_s=NOW + 60.0,
    max_tokens=20,
    stream_subject="slo.v1.stream.t.1",
)


def sure(record: Record | None) -> Record:
    assert record is not None
    return record


def in_state(state: State, record: Record = NEW) -> Record:
    """The record brought to this state, at attempt 1 where it has had one."""
    at = sure(life.placed(record, OWNER, HERE, "i1", attempt=record.attempt))
    reached = {
        State.WAITING: record,
        State.PLACED: at,
        State.RELEGATED: life.relegated(at, OWNER),
        State.CANCELLED_WAITING: life.cancelled(record),
        State.CANCELLED_PLACED: life.cancelled(at),
        State.CANCELLED_RELEGATED: life.cancelled(sure(life.relegated(at, OWNER))),
        State.ENDED: ended(at, FinishReason.STOP, MADE, NOW),
    }
    return sure(reached[state])


def over(record: Record, why: str, service_class: ServiceClass) -> AttemptOver:
    return AttemptOver(
        key=record.key,
        attempt=record.attempt,
        replica=record.replica or HERE,
        incarnation=record.incarnation,
        why=why,
        relegated=service_class is ServiceClass.BEST_EFFORT,
        service_class=service_class,
        resume=MADE,
    )


def variants(event: Event, record: Record) -> Iterator[Record | None]:
    """The event in every form that it can take, from the instance that may cause it."""
    standard, best_effort = ServiceClass.STANDARD, ServiceClass.BEST_EFFORT
    match event:
        case Event.PLACED:
            yield life.placed(record, OWNER, THERE, "i2", attempt=record.attempt)
        case Event.DRAWN:
            yield life.drawn(record, "relegation-1", THERE, "i2", standard)
            yield life.drawn(record, "relegation-1", THERE, "i2", best_effort)
        case Event.HELD:
            yield life.held(
                record, record.replica or HERE, record.incarnation, attempt=record.attempt
            )
        case Event.DECLINED:
            yield life.declined(record, OWNER, attempt=record.attempt)
        case Event.RELEGATED:
            yield life.relegated(record, OWNER)
        case Event.SETTLED:
            for why in (*life.FINAL, "relegated", "offloaded", "drained", "withdrawn"):
                for service_class in ServiceClass:
                    for allowed in (True, False):
                        asked = replace(record, allow_relegation=allowed)
                        yield life.settled(asked, over(record, why, service_class), OTHER, NOW)
        case Event.MOVED:
            for service_class in ServiceClass:
                before = replace(record, service_class=service_class)
                yield life.moved(before, before, OTHER, NOW)
        case Event.LOST:
            for losses in range(min(record.lost, LIMIT - 1), LIMIT):
                for why in ("", "offloaded", *life.FINAL):
                    for relegated in (True, False):
                        before = replace(record, lost=losses)
                        yield life.lost(
                            before,
                            before,
                            OTHER,
                            NOW,
                            resume=MADE,
                            why=why,
                            relegated=relegated,
                            limit=LIMIT,
                        )
        case Event.CANCELLED:
            yield life.cancelled(record)
        case Event.CLOSED:
            yield life.closed(record, NOW)
        case Event.REFUSED:
            yield life.refused(record, OWNER, NOW, message="no", retry_after_s=2.0)
        case Event.EXPIRED:
            yield life.expired(record, NOW)
        case Event.UNSERVED:
            yield life.unserved(record, NOW)
        case Event.FITTED:
            for context_tokens in (1, record.prompt_tokens + 1):
                yield life.fitted(record, context_tokens, NOW)


@pytest.mark.parametrize("event", Event, ids=lambda event: event.value)
@pytest.mark.parametrize("state", State, ids=lambda state: state.value)
def test_every_event_in_every_state_does_what_the_table_says(state: State, event: Event) -> None:
    record = in_state(state)
    assert state_of(record) is state
    results = list(variants(event, record))
    reached = {None if after is None else state_of(after) for after in results}
    assert reached == (set(LIFE[event].get(state, ())) or {None})


def test_every_event_has_a_row_and_a_function_of_its_name() -> None:
    assert set(LIFE) == set(Event)
    assert all(callable(getattr(life, event.value)) for event in Event)
    assert all(State.ENDED not in row for row in LIFE.values()), "nothing changes an ended record"


def test_no_other_file_changes_a_record() -> None:
    """By its fields: a call of `replace` that sets one that only records have."""
    allowed = {"shared/core/record/record.py", "shared/core/record/verdict.py"}
    found = []
    for room in ("services", "shared", "loadgen"):
        for path in (ROOT / room).rglob("*.py"):
            calls = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call))
            for call in calls:
                named = isinstance(call.func, ast.Name) and call.func.id == "replace"
                if named and {k.arg for k in call.keywords} & CHANGING:
                    found.append(str(path.relative_to(ROOT)))
    assert set(found) == allowed


def cell(event: Event, state: State) -> str:
    return " or ".join(LIFE[event].get(state, ())) or "-"


def test_the_docs_show_the_same_table() -> None:
    states = [state for state in State if state is not State.ENDED]
    table = ["| event | " + " | ".join(states) + " |", "|---" * (1 + len(states)) + "|"]
    for event in LIFE:
        cells = " | ".join(cell(event, state) for state in states)
        table.append(f"| `{event.value}` | {cells} |")
    assert "\n".join(table) in DOCS.read_text(), table


# ------------------------------------------------------------ guards beside the table

PLACED, RELEGATED = in_state(State.PLACED), in_state(State.RELEGATED)
LATER = sure(life.placed(PLACED, OWNER, THERE, "i2", attempt=1))  # the next attempt, elsewhere

STALE: dict[str, Callable[[], Record | None]] = {
    "placed by another": lambda: life.placed(NEW, OTHER, HERE, "i1", attempt=0),
    "placed at an older attempt": lambda: life.placed(LATER, OWNER, HERE, "i1", attempt=1),
    "held at another replica": lambda: life.held(PLACED, THERE, "i1", attempt=1),
    "held by another incarnation": lambda: life.held(PLACED, HERE, "i0", attempt=1),
    "held at another attempt": lambda: life.held(PLACED, HERE, "i1", attempt=2),
    "declined for another": lambda: life.declined(PLACED, OTHER, attempt=1),
    "declined at an older attempt": lambda: life.declined(LATER, OWNER, attempt=1),
    "relegated by another": lambda: life.relegated(PLACED, OTHER),
    "settled at an older attempt": lambda: life.settled(
        LATER, over(PLACED, "stop", ServiceClass.STANDARD), OWNER, NOW
    ),
    "settled by another replica": lambda: life.settled(
        PLACED, replace(over(PLACED, "stop", ServiceClass.STANDARD), replica=THERE), OWNER, NOW
    ),
    "settled by another incarnation": lambda: life.settled(
        PLACED, replace(over(PLACED, "stop", ServiceClass.STANDARD), incarnation="i0"), OWNER, NOW
    ),
    "moved since it was seen": lambda: life.moved(LATER, PLACED, OTHER, NOW),
    "taken over by another since": lambda: life.moved(
        sure(life.moved(NEW, NEW, OTHER, NOW)), NEW, "admission-3", NOW
    ),
    "lost, but moved since": lambda: life.lost(
        LATER, PLACED, OTHER, NOW, resume=MADE, limit=LIMIT
    ),
    "refused by another": lambda: life.refused(
        PLACED, OTHER, NOW, message="no", retry_after_s=1.0
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STALE)
def test_an_event_that_no_longer_applies_changes_nothing(name: str) -> None:
    assert STALE[name]() is None


def test_a_hold_writes_nothing() -> None:
    assert life.held(PLACED, HERE, "i1", attempt=1) is PLACED


def test_the_pool_makes_a_request_best_effort_without_a_place() -> None:
    assert RELEGATED.service_class is ServiceClass.BEST_EFFORT
    assert (RELEGATED.relegated, RELEGATED.replica, RELEGATED.incarnation) == (True, None, "")


def test_the_first_verdict_of_a_cancelled_request_says_what_its_attempt_did() -> None:
    there = in_state(State.CANCELLED_PLACED)
    whys = {"stop": FinishReason.STOP, "drained": FinishReason.CANCELLED}
    for why, reason in whys.items():
        after = sure(life.settled(there, over(there, why, ServiceClass.STANDARD), OWNER, NOW))
        assert after.verdict is not None
        assert after.verdict.finish_reason is reason
        assert after.verdict.output_tokens == 2


def test_a_request_that_was_not_to_be_relegated_is_refused_instead() -> None:
    strict = replace(PLACED, allow_relegation=False)
    after = sure(life.settled(strict, over(strict, "relegated", ServiceClass.STANDARD), OWNER, NOW))
    assert after.verdict is not None
    assert after.verdict.finish_reason is FinishReason.REFUSED
    assert after.verdict.retry_after_s == 1.0


def test_losses_are_counted_until_the_limit_fails_the_request() -> None:
    record, losses = PLACED, 0
    while record.verdict is None:
        record = sure(life.lost(record, record, OWNER, NOW, resume=MADE, limit=LIMIT))
        losses += 1
        if record.verdict is None:
            assert (record.lost, record.left) == (losses, "lost")
            record = sure(life.placed(record, OWNER, HERE, "i1", attempt=record.attempt))
    assert losses == LIMIT
    assert record.verdict.finish_reason is FinishReason.FAILED
    assert record.verdict.message == "the replicas of 3 attempts were lost"


@pytest.mark.parametrize("why", ["", "drained", "relegated", "no such word"])
def test_a_request_whose_tokens_are_all_made_ends_whatever_its_worker_says(why: str) -> None:
    """It was placed again, and held for ever: nothing is planned for it."""
    whole = replace(PLACED, max_tokens=2)
    for after in (
        life.settled(whole, over(whole, why, ServiceClass.STANDARD), OWNER, NOW),
        life.lost(whole, whole, OWNER, NOW, resume=MADE, why=why, limit=LIMIT),
        life.fitted(replace(RELEGATED, resume=MADE), NEW.prompt_tokens + 2, NOW),
    ):
        verdict = sure(after).verdict
        assert verdict is not None
        assert (verdict.finish_reason, verdict.output_tokens) == (FinishReason.LENGTH, 2)


@pytest.mark.parametrize("by_its_worker", [True, False])
def test_a_request_in_two_engines_that_died_is_given_to_no_third(by_its_worker: bool) -> None:
    """The worker still reports it, or its log alone tells. In between a replica is lost as any
    other, which counts apart.
    """

    def died(record: Record) -> Record:
        placed = sure(life.placed(record, OWNER, HERE, "i1", attempt=record.attempt))
        if by_its_worker:
            end = over(placed, life.ENGINE_DIED, ServiceClass.STANDARD)
            return sure(life.settled(placed, end, OWNER, NOW))
        made, why = placed.resume, life.ENGINE_DIED
        return sure(life.lost(placed, placed, OWNER, NOW, resume=made, why=why, limit=LIMIT))

    once = died(NEW)
    assert (state_of(once), once.engines_died) == (State.WAITING, 1)
    placed = sure(life.placed(once, OWNER, HERE, "i2", attempt=once.attempt))
    resume = placed.resume
    lost = sure(life.lost(placed, placed, OWNER, NOW, resume=resume, limit=LIMIT))
    assert (state_of(lost), lost.engines_died) == (State.WAITING, 1)
    verdict = died(lost).verdict
    assert verdict is not None
    assert verdict.finish_reason is FinishReason.INVALID
    assert verdict.message.startswith(life.BREAKS_ENGINES)


def test_a_record_is_stored_as_before_the_states_had_names() -> None:
    """Records written before an upgrade are read, and the bytes are the same strings."""
    stored = [state.value for state in RecordState]
    assert stored == ["placing", "relegated", "ended"]
    for state in State:
        record = in_state(state)
        raw = msgspec.msgpack.encode(record)
        assert msgspec.msgpack.decode(raw)["state"] in stored
        assert msgspec.msgpack.decode(raw, type=Record) == record


# ------------------------------------------------------------ along every life


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[Event, Record]]:
    """Events drawn at random, those that changed the record, with what they made of it."""
    record = replace(NEW, allow_relegation=draw(st.booleans()))
    story: list[tuple[Event, Record]] = []
    for event in draw(st.lists(st.sampled_from(Event), max_size=30)):
        owner = replace(record, owner=OWNER) if record.verdict is None else record
        after = draw(st.sampled_from(list(variants(event, owner))))
        if after is not None:
            record = replace(after, allow_relegation=record.allow_relegation)
            story.append((event, record))
    return story


@given(lives())
def test_along_every_life(story: list[tuple[Event, Record]]) -> None:
    before = NEW
    for event, record in story:
        state = state_of(record)
        assert state in LIFE[event][state_of(before)]
        assert (record.verdict is not None) == (state is State.ENDED)
        assert (record.state == RecordState.ENDED) == (state is State.ENDED)
        if state is not State.ENDED:
            placed = state in (State.PLACED, State.CANCELLED_PLACED)
            assert (record.replica is not None) == placed
        assert record.attempt - before.attempt == (event in (Event.PLACED, Event.DRAWN))
        assert record.relegated >= before.relegated, "once best-effort, remembered"
        assert record.cancelled >= before.cancelled, "a tombstone stays"
        assert record.lost >= before.lost or state is State.ENDED
        if record.state == RecordState.RELEGATED:
            assert record.relegated
            assert record.service_class is ServiceClass.BEST_EFFORT
        before = record
    if before.verdict is not None:
        assert [state_of(record) for _, record in story].index(State.ENDED) == len(story) - 1
