"""The work that prefills still are, and what the present decodes leave of the time."""

import math
from collections.abc import Sequence

import numpy as np

from shared.columns import Ints
from shared.perf.shape import BatchShape
from shared.policy import chunk
from shared.policy.chunk import Rows
from shared.policy.seam import Bools, Floats, View
from shared.policy.slackline.due import Due
from shared.policy.slackline.forecast import Passes, Work
from shared.policy.slackline.iteration import BATCH_TOKENS
from shared.policy.slackline.price import Prices
from shared.policy.slackline.token_order import MARGIN_S, costs_of_one
from shared.schemas import Offer

# The most of the time that passes may take for the sake of a TTLT, while a prefill waits; and where
# not all prefills can be in time anyway, beside requests that are no whole answers, without a draft
# model.
HASTE, HASTE_IF_LATE = 0.6, 0.9
MOST = np.iinfo(np.int32).max  # the power of two where there is no TTLT


def work_of_rows(view: View, due: Due, rows: Rows, prices: Prices) -> Work:
    """[rows] the prefills of these rows."""
    cached, output = view.computed_tokens[rows], due.output_tokens[rows]
    tokens = view.target_tokens[rows]
    return Work(
        due.prefill_unix_s[rows] - view.start_unix_s,
        prices.prefill_s(tokens - cached, cached),
        view.importance[rows],
        due.pace_s[rows],
        prices.decoding_s(tokens + output / 2),
        output,
    )


def work_of_offers(offers: Sequence[Offer], due: Due, now_unix_s: float, prices: Prices) -> Work:
    """[offers] the prefills of these offers. `due` runs along them."""
    known = [offer.prompt_tokens + offer.generated_tokens for offer in offers]
    tokens = np.array(known, dtype=np.float64)
    return Work(
        due.prefill_unix_s - now_unix_s,
        prices.prefill_s(tokens, np.zeros(len(offers))),
        np.array([offer.importance for offer in offers], dtype=np.float64),
        due.pace_s,
        prices.decoding_s(tokens + due.output_tokens / 2),
        due.output_tokens,
    )


def unhurried(view: View, due: Due, decodes: Rows, *, waits: bool, late: bool = False) -> Due:
    """The bounds under which no TTLT makes an iteration too short for a pass of all decodes with as
    long a TTLT, to the next power of two seconds, or a shorter one. `waits`: a prefill does, and is
    not to wait until the answers that have begun end. Then the passes that a TTLT asks for take at
    most HASTE of the time. `late`: not all prefills can be in time. Then it is a pass of all
    decodes, without a draft model in HASTE_IF_LATE of the time. A pace that the SLO names beside
    the TTLT stays. `decodes`: the standard ones.
    """
    has_ttlt = view.has_ttlt
    if not np.count_nonzero(has_ttlt[decodes]):
        return due
    usable, margins_s = 1.0, 2 * MARGIN_S
    if waits:
        usable, margins_s = HASTE_IF_LATE if late and view.draft is None else HASTE, 0.0
    every = chunk.decodes_of(view, decodes)
    every_s = view.profile.batch_s(every)
    longest_s = (every_s + margins_s) / usable
    short = has_ttlt & (due.pace_s < longest_s)
    if not np.count_nonzero(short):
        return due
    pace_s = due.pace_s.copy()
    own_s = np.maximum(pace_s, view.tightest_tbt_s)  # no longer than the SLO's own pace
    if late:
        pace_s[short] = np.minimum(longest_s, own_s[short])
        return due._replace(pace_s=pace_s)
    powers = np.frexp(np.where(has_ttlt, view.last_due_unix_s - view.arrived_unix_s, 0.0))[1]
    of_decodes = np.where(has_ttlt, powers, MOST)[decodes]
    one_s, token_s = costs_of_one(view, every, every_s)
    each_s: Floats = one_s + token_s * view.top_tokens[decodes].astype(np.float64)
    fixed_s = every_s - float(each_s.sum()) + margins_s
    for power in set(powers[short].tolist()):
        some = short & (powers == power)
        always = of_decodes <= power
        least_s = _least_s(longest_s, fixed_s, each_s, due.pace_s[decodes], always, usable)
        longer_s = np.maximum(due.pace_s[some], least_s)
        pace_s[some] = np.minimum(longer_s, own_s[some])
    return due._replace(pace_s=pace_s)


def _least_s(
    longest_s: float, fixed_s: float, each_s: Floats, paces_s: Floats, always: Bools, usable: float
) -> float:
    """The shortest pace in which there is time for a pass of the decodes in `always`, with the part
    of each other that its own pace asks for. `longest_s`: enough for a pass of all. `fixed_s`: of a
    pass of none; `each_s`: [decodes] of one more. `usable`: the share of the time for passes.
    """
    least_s, before_s = longest_s, math.inf
    while least_s < before_s:  # the fewer run always, the shorter it is
        before_s = least_s
        part = ~always & (paces_s > least_s)
        # a pass takes whole_s, and share of the pace
        whole_s = fixed_s + float(each_s[~part].sum())
        share = float((each_s[part] / paces_s[part]).sum())
        least_s = min(whole_s / (usable - share), before_s)
    return least_s


def _part(share: Floats, context: Ints) -> BatchShape:
    """The shape of these shares of decodes."""
    return BatchShape(
        decodes=math.ceil(share.sum() - 1e-9), decode_context=int((share * context).sum())
    )


def passes_of(
    view: View, due: Due, decodes: Rows, token_due_s: Floats, prices: Prices, speed: float
) -> Passes:
    """The passes of these decodes, one in each tightest pace. A decode of a looser pace runs in as
    many of them as its own asks. `token_due_s`: [rows of the view] the latest for the next token of
    each decode, in seconds from the start. `speed`: a pass brings each so many tokens.
    """
    if not len(decodes):
        return Passes(math.inf, math.inf, math.inf, 0.0, prices.batch_s)
    paces_s = due.pace_s[decodes]
    pace_s = float(paces_s.min())
    share = pace_s / paces_s
    context = view.top_tokens[decodes]
    shape = _part(share, context)
    pass_s = view.profile.batch_s(shape)
    first_s = max(float(token_due_s[decodes].min()) - pass_s, 0.0)
    ends_s = first_s + pass_s
    every_s = max(speed * pace_s, pass_s)
    # prompts beside a pass come cheaper than in a batch of their own, up to a full batch
    room_s = every_s - MARGIN_S
    tokens = view.profile.prefill_budget(shape, 0, room_s, BATCH_TOKENS) if room_s > pass_s else 0
    if tokens:
        beside_s = view.profile.batch_s(shape.with_chunk(tokens, 0))
        pass_s = min(pass_s, max(beside_s - prices.prompt_s(tokens), 0.0))
    return Passes(first_s, ends_s, every_s, pass_s, prices.batch_s)
