"""Tests of the predicted replica: the request table as it will be once the plans in flight are
done, after launches and leaps, and with the draft model's KV.
"""

import math

import numpy as np
import pytest

from shared.columns import pack
from shared.core.prefixes.kept import KeptPrefixes
from shared.core.replica.events import DraftedIteration, Leapt
from shared.core.replica.learning import Lead, Learning
from shared.core.replica.prediction import Entries, Prediction
from shared.core.replica.reconciliation import Landing, Reconciliation
from shared.core.replica.request_table import RequestTable
from shared.core.replica.table_rows import COLUMNS
from shared.perf.draft import Draft
from shared.perf.draft_correction import DraftCorrection
from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.policy import registry
from shared.policy.seam import Choice, Speculation
from shared.prefix import CHAIN_TOKENS, chain_of, prefix_of
from shared.schemas import Offer
from shared.vocabulary import Slo
from tests import made

NOW, END = 1000.0, 1000.5
SLOT, PROMPT, TBT_S = 3, 20, 0.1


class HalfASecond(Profile):
    """Every iteration takes as long."""

    name = "half a second"

    def batch_s(self, shape: BatchShape) -> float:
        return END - NOW


def offer(key: str, generated: int, ttft_s: float | None) -> Offer:
    slo = Slo(ttft_s=ttft_s, tbt_s=TBT_S)
    return made.offer(
        key,
        slo=slo,
        arrived_unix_s=NOW - 1.0,
        prompt_tokens=PROMPT,
        max_tokens=50,
        generated_tokens=generated,
        next_due_unix_s=slo.first_due_unix_s(NOW - 1.0),
        first_token_unix_s=NOW - 0.2 if generated else math.inf,
        newest_token_unix_s=NOW - 0.1 if generated else math.inf,
    )


class Scene:
    """One request in a real table. `computed` and `generated` are what a worker has of it."""

    def __init__(self, *, ttft_s: float | None, computed: int, generated: int) -> None:
        self.table = RequestTable(slots=8, kv_blocks=1000, block_tokens=1, context_tokens=1000)
        self.ahead = Prediction(self.table, DraftCorrection(Draft(HalfASecond(), 1.0, 1.0)))
        self.table.add(SLOT, offer("t.a", generated, ttft_s), computed_tokens=computed)
        self.seq = 0

    def launch(self, cap: int, speculation: Speculation | None = None) -> Entries:
        slots, caps = np.array([SLOT], dtype=np.int32), np.array([cap], dtype=np.int32)
        entries = self.ahead.entries(Choice(slots=slots, caps=caps, speculation=speculation))
        flight = self.ahead.launch(self.seq, entries, NOW + self.seq * (END - NOW), HalfASecond())
        assert flight.caps.tolist() == [cap], "the scene wants this cap"
        self.seq += 1
        return entries

    def acked(self, emitted: int, ended_unix_s: float, drafted: bytes = b"") -> None:
        """The decode of the first plan in flight ended, with so many tokens."""
        flight = self.ahead.flights.popleft()
        did = {SLOT: (emitted, emitted)}
        ack = made.ack(did, plan_seq=0, ended_unix_s=ended_unix_s, drafted=drafted)
        Reconciliation(self.table, self.ahead).reconcile(flight, ack)
        self.ahead.retime(ended_unix_s, HalfASecond())

    def newest_unix_s(self) -> float:
        return self.row()["newest_token_unix_s"]

    def row(self) -> dict[str, float]:
        self.ahead.date_newest_tokens()
        at = self.table.row_of[SLOT]
        return {name: getattr(self.table, name)[at].item() for name in COLUMNS}


def drafts(depth: int) -> Speculation:
    return Speculation(
        method="chain", depth=np.array([depth], dtype=np.int32),
        width=np.array([1], dtype=np.int32),
        budget_tokens=100, needed_limit_tokens=100,
    )  # fmt: skip


def test_a_request_that_makes_its_last_token_leaves_the_live_rows() -> None:
    scene = Scene(ttft_s=2.0, computed=PROMPT + 48, generated=49)
    scene.launch(1)
    assert (scene.table.live, scene.table.used) == (0, 1)


def test_a_leap_dates_the_newest_token_as_single_iterations_do() -> None:
    leapt, stepped = (Scene(ttft_s=2.0, computed=24, generated=5) for _ in range(2))
    for scene in (leapt, stepped):
        scene.launch(1)
    leapt.ahead.leap(Leapt(3, NOW + 3 * (END - NOW), 3 * (END - NOW)), HalfASecond())
    for iteration in range(3):
        stepped.acked(1, NOW + (iteration + 1) * (END - NOW))
        stepped.launch(1)
    assert leapt.row() == pytest.approx(stepped.row())
    leapt.ahead.flights.clear()  # what is left without the plan in flight
    stepped.ahead.flights.clear()
    assert leapt.newest_unix_s() == stepped.newest_unix_s() == NOW + 3 * (END - NOW)


@pytest.mark.parametrize("tokens", [[1], [4, 1, 2], [1, 1, 3, 4, 4, 2, 1, 3]])
@pytest.mark.parametrize("ttft_s", [2.0, None])
def test_a_leap_over_drafts_leaves_to_the_last_bit_what_single_iterations_leave(
    tokens: list[int], ttft_s: float | None
) -> None:
    leapt, stepped = (Scene(ttft_s=ttft_s, computed=24, generated=5) for _ in range(2))
    for scene in (leapt, stepped):
        scene.launch(4, drafts(3))
    ran = []
    for n, kept in enumerate(tokens):
        ended_unix_s = END + 0.7 * n
        shape, columns = BatchShape(decodes=1), np.array([[3], [kept]], dtype=np.int32)
        ran.append(DraftedIteration(ended_unix_s, 0.5, 0.1, shape, *columns))
        stepped.acked(kept, ended_unix_s, drafted=pack([3]))
        stepped.launch(4, drafts(3))
    leapt.ahead.leap(Leapt(len(ran), ended_unix_s, 0.5 * len(ran), ran), HalfASecond())
    [ours], [theirs] = leapt.ahead.flights, stepped.ahead.flights
    assert ours.end_unix_s == ended_unix_s + theirs.predicted_s
    assert ours.has == theirs.has == 24 + sum(tokens)
    assert (ours.shape, ours.draft_s, ours.draft_begins, ours.predicted_s) == (
        theirs.shape, theirs.draft_s, theirs.draft_begins, theirs.predicted_s
    )  # fmt: skip
    theirs.end_unix_s = ours.end_unix_s  # the scene begins its iterations at other instants
    assert leapt.row() == stepped.row()
    for scene in (leapt, stepped):
        scene.ahead.flights.clear()
    assert leapt.newest_unix_s() == stepped.newest_unix_s() == ended_unix_s
    leapt.table.check()


def test_where_draft_kv_is_short_entries_claim_it_in_order_and_keep_what_they_have() -> None:
    """Three decodes of 24 tokens want to draft three deep: room for 28 positions, seven blocks of
    four, for each. 16 blocks have room for two; the third decodes. Those two then go on drafting,
    even if the third comes first in the plan. When one has gone, the third drafts.
    """
    table = RequestTable(
        slots=8, kv_blocks=1000, block_tokens=4, context_tokens=1000, draft_kv_blocks=16
    )
    ahead = Prediction(table, DraftCorrection(Draft(HalfASecond(), 1.0, 1.0)))
    for slot in (0, 1, 2):
        table.add(slot, offer(f"t.{slot}", 5, 2.0), computed_tokens=24)

    def drafting(order: list[int], accepted: int) -> list[int]:
        """The slots that draft in the next iteration, of which each accepts so many drafts."""
        n = len(order)
        column = np.full(n, 3, dtype=np.int32)
        speculation = Speculation("chain", column, np.ones(n, dtype=np.int32), 1 << 20)
        choice = Choice(slots=np.array(order), caps=column + np.int32(1), speculation=speculation)
        entries = ahead.entries(choice)
        flight = ahead.launch(0, entries, NOW, HalfASecond())
        table.check()
        assert entries.speculation is not None
        of = [slot for slot, depth in zip(order, entries.speculation.depth, strict=True) if depth]
        assert all(
            cap == (4 if slot in of else 1) for slot, cap in zip(order, entries.caps, strict=True)
        )
        ahead.flights.popleft()
        tokens = {slot: 1 + accepted if slot in of else 1 for slot in order}
        drafted = pack([3 if slot in of else 0 for slot in order])
        did = {slot: (count, count) for slot, count in tokens.items()}
        ack = made.ack(did, plan_seq=0, drafted=drafted, ended_unix_s=END)
        Reconciliation(table, ahead).reconcile(flight, ack)
        table.check()
        return of

    assert drafting([0, 1, 2], 0) == [0, 1]
    assert table.draft_held_blocks[table.row_of[[0, 1, 2]]].tolist() == [7, 7, 0]
    assert drafting([2, 0, 1], 0) == [0, 1]
    table.remove(0)
    assert drafting([1, 2], 0) == [1, 2]


def test_a_plan_lasts_longer_by_what_comes_back_from_the_host_and_the_engine_is_no_slower() -> None:
    text = list(range(200))
    prefix = prefix_of(chain_of(text))
    asked = made.offer(prompt_tokens=200, prefix=prefix)
    table = RequestTable(slots=8, kv_blocks=1000, block_tokens=1, context_tokens=1000)
    table.add(SLOT, asked)
    ahead = Prediction(table, DraftCorrection(None))
    table.expect(KeptPrefixes(1, prefix[:8], prefix[8:], kv_load_s=1 / 1024))
    slots = np.array([SLOT], dtype=np.int32)
    for seq, load_s in enumerate((2 * CHAIN_TOKENS / 1024, 0.0)):
        caps = np.array([4], dtype=np.int32)
        entries = ahead.entries(Choice(slots=slots, caps=caps))
        flight = ahead.launch(seq, entries, NOW, HalfASecond())
        assert (flight.load_s, flight.predicted_s) == (load_s, 0.5 + load_s)
        assert table.load_s[0] == 0.0
    first = ahead.flights[0]
    policy = registry.make("fcfs")
    learned = Learning(policy, HalfASecond(), None, Lead(0.0, 0.0))
    ack = made.ack(exec_s=first.predicted_s, loaded_s=first.load_s)
    learned.ran(ack, first, Landing(first.shape, None, 0), (), NOW)
    assert learned.profile.residual == 0.0
