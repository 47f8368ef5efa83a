"""Tests of the request table: a row keeps its columns as it moves, and loses them at its end."""

from dataclasses import fields

import numpy as np

from shared.core.replica.request_table import RequestTable
from shared.core.replica.table_rows import COLUMNS
from shared.policy.seam import Rows, View
from shared.schemas import Offer
from shared.vocabulary import Slo
from tests import made
from tests.shared.policy.views import Linear


def offer(number: int) -> Offer:
    return made.offer(
        f"t.{number}",
        slo=Slo(ttft_s=1.0, tbt_s=0.1),
        importance=float(number),
        application=f"a{number}",
        arrived_unix_s=1000.0 + number,
        prompt_tokens=10 + number,
        max_tokens=20,
        next_due_unix_s=1001.0 + number,
        expires_unix_s=2000.0 + number,
    )


def row(table: RequestTable, slot: int) -> dict[str, object]:
    return {name: getattr(table, name)[table.row_of[slot]].item() for name in COLUMNS}


def table_with(slots: range) -> RequestTable:
    table = RequestTable(slots=8, kv_blocks=100, block_tokens=4, context_tokens=100)
    for slot in slots:
        table.add(slot, offer(slot))
    return table


def test_a_view_shows_every_column_that_policies_see_under_its_own_name() -> None:
    table = table_with(range(5))
    table.leave(1)
    view = table.view(1000.0, Linear())
    assert isinstance(view, View)
    assert view.rows == 4
    for field in fields(Rows):
        shown, column = getattr(view, field.name), getattr(table, field.name)
        assert np.shares_memory(shown, column), field.name
        assert shown.tolist() == column[:4].tolist(), field.name


def test_a_row_keeps_all_its_columns_wherever_it_moves() -> None:
    table = table_with(range(6))
    before = {slot: row(table, slot) for slot in range(6)}
    table.leave(0)
    table.leave(3)
    table.come_back(0)
    table.remove(1)
    for slot in (0, 2, 3, 4, 5):
        assert row(table, slot) == before[slot], slot
    table.check()


def test_a_row_that_is_used_again_has_nothing_of_its_last_request() -> None:
    table = table_with(range(1))
    fresh = row(table, 0)
    for name in COLUMNS:
        if name != "slot":
            getattr(table, name)[table.row_of[0]] = 1
    table.remove(0)
    table.add(0, offer(0))
    assert row(table, 0) == fresh
