"""The making of one iteration: all decodes, then prefill chunks in an order, within a token
budget, a time budget and the free KV.

KV rules, the same for every policy that fills iterations here:
- Decodes claim first. If KV is short for them, victims are preempted, and no more of them than the
  shortage needs: best-effort before standard, then requests in prefill before decodes, then the
  latest arrived.
- Prefills leave one free block to every running decode, so that each can grow by at least a block
  before any request is preempted.
- A prefill begins only if all of it fits beside the KV that the prefills already begun still need:
  a prefill that has begun can always end. While one prefill cannot begin, none behind it begins (it
  would starve), unless the policy says that others may pass it; those that have begun go on.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from shared.columns import Indices, Ints
from shared.perf.shape import BatchShape
from shared.policy.seam import Bools, Choice, Phase, View

Rows = Indices  # in the view

FOREVER = 1 << 30  # iterations

# Plain ints: numpy compares with an IntEnum five times as slowly, and this runs for every
# iteration.
PREFILL, DECODE = int(Phase.PREFILL), int(Phase.DECODE)


class Decoding(NamedTuple):
    """The decodes of one iteration, and the KV that they leave."""

    rows: Rows
    victims: Rows  # rows to preempt
    free_blocks: int  # after the victims' KV has come free and the decodes have claimed theirs
    shape: BatchShape


def blocks(tokens: int, block_tokens: int) -> int:
    """The number of KV blocks that hold `tokens` positions."""
    return -(-tokens // block_tokens)


def in_order(view: View, rows: Rows, *keys: "np.ndarray[Any, Any]") -> Rows:
    """The rows sorted by these keys (each along the rows), the first key foremost; then by arrival
    and slot.
    """
    return rows[np.lexsort((view.slot[rows], view.arrived_unix_s[rows], *reversed(keys)))]


def decoding(view: View) -> Decoding:
    """The decodes that have tokens still to make, one token each; fewer only if KV is short even
    after preemption.
    """
    rows = (view.in_decode & (view.generated_tokens < view.max_tokens)).nonzero()[0]
    context = view.top_tokens[rows]
    need = np.maximum(context // view.block_tokens + 1 - view.kv_held_blocks[rows], 0)
    free = view.kv_free_blocks - int(need.sum())
    victims = rows[:0]
    if free < 0:
        victims = _victims(view, rows, need, -free)
        runs = ~np.isin(rows, victims)
        rows, context, need = rows[runs], context[runs], need[runs]
        free = view.kv_free_blocks + int(view.kv_held_blocks[victims].sum()) - int(need.sum())
    return Decoding(
        rows, victims, free, BatchShape(decodes=len(rows), decode_context=int(context.sum()))
    )


def decodes_of(view: View, rows: Rows) -> BatchShape:
    """The shape of these decodes alone."""
    return BatchShape(decodes=len(rows), decode_context=int(view.top_tokens[rows].sum()))


def shape_of(view: View, decodes: Decoding, choice: Choice) -> BatchShape:
    """The shape of a whole batch that was filled beside these decodes."""
    shape, n = decodes.shape, len(decodes.rows)
    for slot, tokens in zip(choice.slots[n:].tolist(), choice.caps[n:].tolist(), strict=True):
        shape = shape.with_chunk(tokens, int(view.computed_tokens[view.slot == slot][0]))
    return shape


def as_many_as_fit(
    view: View, shape: BatchShape, rows: Rows, budget_s: float, *, at_least: int
) -> Rows:
    """The longest run of these decodes, from the first on, that fits a batch of `budget_s`."""
    context = view.top_tokens[rows].cumsum()
    fits, exceeds = min(at_least, len(rows)), len(rows) + 1
    while exceeds - fits > 1:
        count = (fits + exceeds) // 2
        more = shape.with_decodes(count, int(context[count - 1]))
        if view.profile.batch_s(more) <= budget_s:
            fits = count
        else:
            exceeds = count
    return rows[:fits]


def _victims(view: View, decodes: Rows, need: Ints, short_blocks: int) -> Rows:
    """The rows whose preemption covers the shortage, in the order of the rule above. Without any
    one of them the shortage would not be covered.
    """
    gain = view.kv_held_blocks.astype(np.int64)
    gain[decodes] += need  # a preempted decode asks for nothing
    may_go = view.kv_held_blocks > 0
    # a decode with no token left to make is about to end
    may_go &= ~view.in_decode | (view.generated_tokens < view.max_tokens)
    rows = np.flatnonzero(may_go)
    rows = rows[
        np.lexsort(
            (
                -view.slot[rows],
                -view.arrived_unix_s[rows],
                view.in_decode[rows],
                view.standard[rows],
            )
        )
    ]
    total = np.cumsum(gain[rows])
    rows = rows[: int(np.searchsorted(total, short_blocks)) + 1]
    spare = int(gain[rows].sum()) - short_blocks
    chosen = []
    for row in reversed(rows.tolist()):  # a large last victim may make earlier ones needless
        if gain[row] <= spare:
            spare -= int(gain[row])
        else:
            chosen.append(row)
    return np.array(chosen[::-1], dtype=np.intp)


def begun(view: View, decodes: Decoding) -> tuple[int, int]:
    """The number of prefills that have begun, and the blocks that they still need."""
    rows = (view.phase == PREFILL).nonzero()[0]
    if not len(rows):
        return 0, 0
    if len(decodes.victims):
        rows = rows[~np.isin(rows, decodes.victims)]
    owed = 0
    for row in rows.tolist():  # of the few
        promised = int(view.target_tokens[row]) + int(view.unsure_tokens[row])
        owed += max(blocks(promised, view.block_tokens) - int(view.kv_held_blocks[row]), 0)
    return len(rows), owed


def none_finds_kv(
    view: View, decodes: Decoding, order: Rows, passed: Bools, *, kept_blocks: int
) -> bool:
    """Tells whether none of these prefills can run, since none has begun and there is no KV for
    those that may begin. `passed`, `kept_blocks`: as in `fill`.
    """
    if not len(order) or (view.phase[order] == PREFILL).any():
        return False
    ends = (~passed[order]).nonzero()[0]
    if len(ends):
        order = order[: int(ends[0]) + 1]
    tokens = view.target_tokens[order] + view.unsure_tokens[order]
    wholes = -(-tokens // view.block_tokens) - view.kv_held_blocks[order]
    room = decodes.free_blocks - len(decodes.rows) - begun(view, decodes)[1]
    return int(wholes.min()) > room - kept_blocks


def fill(
    view: View,
    decodes: Decoding,
    order: Rows,
    *,
    limit_tokens: int,
    budget_s: float = math.inf,
    relegate: Rows | None = None,
    steady: bool = False,
    passed: Bools | None = None,
    kept_blocks: int = 0,
) -> Choice:
    """The iteration: the decodes, then chunks of the prefills in `order`, until a budget or the KV
    is used up.

    limit_tokens: the most prefill tokens.
    budget_s: the longest that the whole predicted iteration may take. Each chunk is fitted to the
        batch so far (the decodes, the chunks before it, the context it stands on), so that the sum
        is exact. What comes back from the host's memory comes as a whole: where that takes longer
        than there is, the first prefill begins even so.
    passed: [rows] true for a row that lets others of `order` begin if it finds no KV; None: no row.
    kept_blocks: KV that a prefill leaves free when it begins, beyond the rules above.
    steady: `order` stays as it is while nothing but progress happens. If its first row takes the
        whole limit, that row then does so again until its last chunk.

    With an empty `order` the iteration is the decodes alone, and stays right until something
    happens.
    """
    bt, profile, shape = view.block_tokens, view.profile, decodes.shape
    preempted = set(decodes.victims.tolist())
    room = decodes.free_blocks - len(decodes.rows)
    begun_left, owed = begun(view, decodes)
    rows: list[int] = []
    chunks: list[int] = []
    shut = False  # a prefill could not begin
    for row in order.tolist():
        if limit_tokens <= 0 or (shut and not begun_left):
            break
        if row in preempted:
            continue
        cached, held = int(view.computed_tokens[row]), int(view.kv_held_blocks[row])
        unsure, target = int(view.unsure_tokens[row]), int(view.target_tokens[row])
        goes_on = view.phase[row] == PREFILL
        whole = max(blocks(target + unsure, bt) - held, 0)
        if not goes_on and (shut or whole > room - owed - kept_blocks):
            shut = shut or passed is None or not passed[row]
            continue
        begun_left -= int(goes_on)
        wanted = min(target - cached, limit_tokens, (held + max(room, 0)) * bt - cached - unsure)
        if wanted <= 0:
            continue
        tokens, load_s = wanted, float(view.load_s[row])
        if budget_s < math.inf:
            tokens = profile.prefill_budget(shape, cached, budget_s - load_s, wanted)
            if tokens <= 0 and load_s and not rows:
                tokens = profile.prefill_budget(shape, cached, budget_s, wanted)
            budget_s -= load_s
        if tokens <= 0:
            break
        rows.append(row)
        chunks.append(tokens)
        limit_tokens -= tokens
        shape = shape.with_chunk(tokens, cached)
        taken = max(blocks(cached + unsure + tokens, bt) - held, 0)
        room -= taken
        owed += -taken if goes_on else whole - taken
        if tokens < wanted:
            break
    n = len(decodes.rows)
    repeats = 1
    if n + len(rows) and not preempted and (relegate is None or len(relegate) == 0):
        if len(order) == 0:
            repeats = FOREVER
        elif steady and budget_s == math.inf and limit_tokens == 0 and rows == order[:1].tolist():
            repeats = max(
                1, int(view.target_tokens[rows[0]] - view.computed_tokens[rows[0]] - 1) // chunks[0]
            )
    caps = np.empty(n + len(rows), dtype=np.int32)
    caps[:n] = 1
    caps[n:] = chunks
    slots = view.slot[np.concatenate((decodes.rows, np.array(rows, dtype=np.intp)))]
    return Choice(
        slots=slots,
        caps=caps,
        preempt=view.slot[decodes.victims].tolist(),
        relegate=() if relegate is None else view.slot[relegate].tolist(),
        repeats=repeats,
    )
