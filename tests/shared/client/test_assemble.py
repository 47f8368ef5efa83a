"""Tests of the client's reading of a stream: each token once, whatever the network does."""

import random

from hypothesis import given
from hypothesis import strategies as st

from shared.client.assemble import Assembler
from shared.schemas import End, Status, StreamEvent
from shared.vocabulary import FinishReason, ServiceClass
from tests.shared.client.served_log import Log, Reader, logs, verdict


@given(logs(), st.data())
def test_whatever_is_lost_doubled_or_reordered_the_tokens_shown_are_those_of_the_log(
    log: Log, data: st.DataObject
) -> None:
    end = verdict(len(log.tokens))
    events: list[StreamEvent] = [*log.deltas(), End(verdict=end)]
    arriving = data.draw(st.lists(st.sampled_from(range(len(events))), max_size=2 * len(events)))
    assembler, reader = Assembler(), Reader(log)
    made = 0
    for number in arriving:
        made = max(made, min(number + 1, len(log.entries)))  # what was sent is in the log
        reader.show(assembler.take(events[number]))
        if data.draw(st.booleans()):
            over = made == len(log.entries) and data.draw(st.booleans())
            reader.show(assembler.fill(log.replay(assembler.ask(), made, end if over else None)))
    for _ in range(3):
        reader.show(assembler.fill(log.replay(assembler.ask(), len(log.entries), end)))
    assert (reader.tokens, reader.text, reader.ends) == (log.tokens, log.text, 1)
    assert assembler.ended
    assert not assembler.missing


@given(logs(), st.randoms())
def test_events_that_all_come_in_order_need_no_question_to_the_log(
    log: Log, rng: random.Random
) -> None:
    assembler, reader = Assembler(), Reader(log)
    for event in [*log.deltas(), End(verdict=verdict(len(log.tokens)))]:
        for _ in range(rng.choice((1, 1, 2))):
            reader.show(assembler.take(event))
            assert not assembler.missing
    assert (reader.tokens, reader.text, reader.ends) == (log.tokens, log.text, 1)


def test_a_status_of_a_past_attempt_is_not_shown() -> None:
    assembler = Assembler()
    new = Status(state="replaced", service_class=ServiceClass.STANDARD, attempt=2)
    old = Status(state="accepted", service_class=ServiceClass.STANDARD, attempt=1)
    assert assembler.take(new) == [new]
    assert assembler.take(old) == []


def test_a_request_that_made_nothing_ends_at_once() -> None:
    end = End(verdict=verdict(0, FinishReason.REFUSED))
    assert Assembler().take(end) == [end]
