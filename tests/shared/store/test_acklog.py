"""Tests of an ack log with entries that no worker of ours writes: a reader leaves those out."""

import pytest
from msgspec.structs import replace

from shared.columns import pack, unpack_list
from shared.measure import Measure
from shared.schemas import Held, PlanAck, Resume, Snapshot, SnapshotEntry
from shared.store.acklog import Stories, decode_log, encode_entry
from shared.vocabulary import ReplicaId, RequestKey, ServiceClass, Slo
from tests import made
from tests.simulated.folding import fold

R, KEY = ReplicaId("r1"), RequestKey("acme.q1")
BEFORE = Resume(tokens=pack([7, 8]), text="gh", measure=Measure(tokens=2))
RECORD = made.record(
    KEY,
    owner="admission-1",
    attempt=1,
    slo=Slo(ttft_s=0.5, tbt_s=0.03),
    max_tokens=100,
    resume=BEFORE,
)


def held(offset: int) -> Held:
    return Held(slot=0, key=KEY, attempt=1, offset=offset, text_offset=2)


def ack(emitted: int, tokens: list[int], *holds: Held) -> PlanAck:
    return made.ack(
        replica=R,
        slots=pack([0]),
        computed=pack([1]),
        emitted=pack([emitted]),
        tokens=pack(tokens),
        texts=["x"],
        held=list(holds),
    )


def resumed(stories: Stories) -> Resume:
    return stories[KEY, 1, "i"].resume(RECORD)


def test_the_output_of_an_attempt_goes_on_behind_that_of_those_before() -> None:
    resume = resumed(fold([ack(1, [9], held(2))], R))
    assert unpack_list(resume.tokens) == [7, 8, 9]
    assert resume.text == "ghx"
    assert resume.measure.tokens == 3


@pytest.mark.parametrize("emitted", [2**31 - 1, 2, 0, -1])
def test_an_ack_that_counts_other_tokens_than_it_has_is_left_out(emitted: int) -> None:
    """Else its reader would time tokens that there are not."""
    first = ack(1, [9], held(2))
    stories = fold([first, ack(emitted, [10])], R)
    assert stories[KEY, 1, "i"].emissions == [(1, 0.0, None)]
    assert resumed(stories) == resumed(fold([first], R))


@pytest.mark.parametrize("found", [-1, 2, 2**31 - 1])
def test_an_ack_that_found_more_in_a_cache_than_it_computed_is_left_out(found: int) -> None:
    first = ack(1, [9], held(2))
    stories = fold([first, replace(ack(1, [10]), cached=pack([found]))], R)
    assert resumed(stories) == resumed(fold([first], R))


@pytest.mark.parametrize("offset", [0, 1])
def test_an_attempt_that_began_elsewhere_than_its_record_says_adds_nothing(offset: int) -> None:
    """Its measure would be that of another output, and its end could not be reported."""
    assert resumed(fold([ack(1, [9], held(offset))], R)) == BEFORE


def test_a_snapshot_whose_measure_is_of_another_output_adds_nothing() -> None:
    entry = SnapshotEntry(
        held=held(0),
        tokens=pack([7, 8, 9]),
        text="ghx",
        measure=Measure(tokens=2**31 - 1),
        service_class=ServiceClass.STANDARD,
    )
    assert resumed(fold([Snapshot(incarnation="i", entries=[entry], overs=[])], R)) == BEFORE


def test_an_entry_that_is_no_text_is_left_out() -> None:
    """An error in it would end every admission that reads the log."""
    whole = encode_entry(ack(1, [9], held(2)))
    broken = whole.replace(b"\xa1x", b"\xa1\xff")
    assert broken != whole
    assert list(decode_log([(1, broken), (2, whole)])) == [ack(1, [9], held(2))]
