"""Tests of the builder of acks, in which a worker reports an iteration to its planner."""

from services.worker.core.ack_builder import AckBuilder
from shared.columns import pack, unpack_list
from shared.core.replica.reconciliation import well_formed
from shared.core.worker.step import Step, Timing, TurnDone
from shared.schemas import PlanAck
from shared.vocabulary import FinishReason, ReplicaId
from tests import made

REPLICA = ReplicaId("r")
PLAN = made.plan(
    [1, 2, 3, 5], [1, 8, 1, 1], replica=REPLICA, epoch=4, sync=0, seq=7, preempted=pack([6])
)


def built(ack: AckBuilder) -> PlanAck:
    return ack.build(
        replica=REPLICA, incarnation="i", epoch=5, ack_seq=9, held=[], free_blocks=3
    )  # fmt: skip


def test_columns_run_along_the_entries_in_the_order_in_which_they_were_added() -> None:
    step = Step(PLAN, [6], [], [], [], None, [5])
    ack = AckBuilder(step, Timing(1.0, 2.0, 0.9, 0.1, 0.2, 0.05))
    ack.add(1, TurnDone(3, [10, 11, 12], "abc", None, drafted=4))
    ack.add(2, TurnDone(8, [], "", None, cached=6))  # a chunk: no token, no text
    ack.add(3, TurnDone(1, [13], "d", FinishReason.STOP))
    ack.add_answering(1, 2)
    ack.add_end(3, "stop")
    entry = built(ack)
    columns = (entry.slots, entry.computed, entry.emitted, entry.drafted, entry.cached)
    assert [unpack_list(column) for column in columns] == [
        [1, 2, 3], [3, 8, 1], [3, 0, 1], [4, 0, 0], [0, 6, 0],
    ]  # fmt: skip
    assert unpack_list(entry.tokens) == [10, 11, 12, 13]
    assert entry.texts == ["abc", "d"]
    assert (unpack_list(entry.answering), unpack_list(entry.thinking_tokens)) == ([1], [2])
    assert entry.ended == [(3, "stop")]
    assert (unpack_list(entry.skipped), unpack_list(entry.preempted)) == ([5], [6])
    assert (entry.epoch, entry.plan_seq, entry.ack_seq) == (4, 7, 9), "the plan's epoch"
    assert (entry.started_unix_s, entry.ended_unix_s) == (1.0, 2.0)
    assert (entry.exec_s, entry.idle_s, entry.outside_s) == (0.9, 0.1, 0.2)
    assert entry.late_s == 0.05
    assert well_formed(entry, b"", 8)
    assert not well_formed(entry, b"", 3), "slot 3 does not exist"


def test_an_end_without_tokens_has_a_text_of_its_own() -> None:
    ack = AckBuilder(Step(PLAN, [], [], [], [], None, []))
    ack.add(1, TurnDone(0, [], "", FinishReason.INVALID, refused=True))
    assert built(ack).texts == [""]


def test_an_ack_between_iterations_has_no_plan_and_the_workers_epoch() -> None:
    ack = AckBuilder()
    ack.add_end(2, "withdrawn")
    entry = built(ack)
    assert (entry.epoch, entry.plan_seq, entry.slots, entry.ended) == (
        5,
        0,
        b"",
        [(2, "withdrawn")],
    )
