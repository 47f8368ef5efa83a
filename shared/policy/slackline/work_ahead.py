"""The work that prefills still are, and what the present decodes leave of the time."""

import math
from collections.abc import Sequence

import numpy as np

from shared.columns import Ints
from shared.perf.shape import BatchShape
from shared.policy import chunk
from shared.policy.chunk import Rows
from shared.policy.seam import Floats, View
from shared.policy.slackline.due import Due
from shared.policy.slackline.forecast import Passes, Work
from shared.policy.slackline.iteration import BATCH_TOKENS
from shared.policy.slackline.price import Prices
from shared.policy.slackline.token_order import MARGIN_S
from shared.schemas import Offer

# The most of the time that passes may take for the sake of a TTLT, while a prefill waits.
HASTE = 0.6
MOST = np.iinfo(np.int32).max  # the power of two where there is no TTLT


def work_of_rows(view: View, due: Due, rows: Rows, prices: Prices) -> Work:
    """[rows] the prefills of these rows."""
    cached, output = view.computed_tokens[rows], due.output_tokens[rows]
    return Work(
        due.prefill_unix_s[rows] - view.start_unix_s,
        prices.prefill_s(view.target_tokens[rows] - cached, cached),
        view.importance[rows],
        due.pace_s[rows],
        prices.decoding_s(view.target_tokens[rows] + output / 2),
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


def unhurried(view: View, due: Due, decodes: Rows, *, waits: bool, together: bool = False) -> Due:
    """The bounds under which no TTLT makes an iteration too short for a pass of all decodes with as
    long a TTLT, to the next power of two seconds, or a shorter one; `together`: of all decodes.
    `waits`: a prefill does, and is not to wait until the answers that have begun end. Then the
    passes that a TTLT asks for take at most HASTE of the time. `decodes`: the standard ones.
    """
    whole = view.has_ttlt
    if not np.count_nonzero(whole[decodes]):
        return due
    longest_s = _unhurried_s(view.profile.batch_s(chunk.decodes_of(view, decodes)), waits)
    short = whole & (due.pace_s < longest_s)
    if not np.count_nonzero(short):
        return due
    pace_s = due.pace_s.copy()
    if together:
        pace_s[short] = longest_s
        return due._replace(pace_s=pace_s)
    powers = np.frexp(np.where(whole, view.last_due_unix_s - view.arrived_unix_s, 0.0))[1]
    of_decodes = np.where(whole, powers, MOST)[decodes]
    context = view.top_tokens[decodes]
    for power in set(powers[short].tolist()):
        some = short & (powers == power)
        # all decodes with as long a TTLT or a shorter one; of the others what their paces ask for
        share = np.minimum(due.pace_s[some].min() / due.pace_s[decodes], 1.0)
        share[of_decodes <= power] = 1.0
        least_s = _unhurried_s(view.profile.batch_s(_part(share, context)), waits)
        pace_s[some] = np.maximum(due.pace_s[some], least_s)
    return due._replace(pace_s=pace_s)


def _unhurried_s(pass_s: float, waits: bool) -> float:
    """The pace from which on there is time for such passes. `waits`: a prefill does."""
    return pass_s / HASTE if waits else pass_s + 2 * MARGIN_S


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
