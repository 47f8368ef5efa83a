"""The demand of a request on a replica, as SLOs-Serve counts it (section 3.2.1): prefill tokens by
a deadline, a TPOT after that, memory, a value.

The paper's requests have a TTFT and a TPOT. Other bounds are read as follows:
- *TPOT* is the tightest TBT of the stages still to come (section 3.2.1, multi-decode SLOs). A
  request without one has that of the loose tier (Table 3), so that no request holds KV for ever.
- *TTLT*: decoding may take at most half of the whole time, so TPOT is no looser than that half over
  the longest output expected (mean and two deviations of its application). Prefill must end early
  enough that the output fits before the last token is due. The TPOT of a decode is the time left
  over the tokens left. Where no iteration is so short, the decode is beyond rescue and has the
  loose TPOT.
- *No deadline for the prefill* means within FAR_S.
- *Memory*: the paper knows decode lengths (section 6). Here they are learned: the memory is the
  prompt and the expected output, given its length so far. `max_tokens` is no estimate, since
  callers ask for far more than comes.
- *Prefill tokens* are those left, plus as many more as take the time of attention and of a chunk's
  fixed cost, by the profile. The paper's performance model leaves these two out.
- *Value* is importance.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shared.columns import Ints
from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.policy.chunk import Rows
from shared.policy.lengths import PRIOR_TOKENS, OutputLengths
from shared.policy.seam import Ended, Floats, View
from shared.policy.slos_serve.draft_length import CHUNK_TOKENS, token_s
from shared.policy.sola.output_lengths import LengthDistributions
from shared.schemas import Offer

# Table 3, loose.
LOOSE_TPOT_S = 0.1
# Ours: a prefill without a deadline is planned to end within this.
FAR_S = 3600.0
# Ours: how long a TPOT is expected again after it was last offered.
LATELY_S = 60.0
# Ours: the most prices that are kept.
MOST_PRICES = 65_536


class Demands(NamedTuple):
    """The demands of several requests, in columns."""

    due_unix_s: Floats  # when the prefill must have ended; now for a decode
    prefill_tokens: Floats
    tpot_s: Floats
    context_tokens: Floats  # of its decode, in the mean
    blocks: Ints
    value: Floats

    def beside(self, other: "Demands") -> "Demands":
        return Demands(
            np.concatenate((self.due_unix_s, other.due_unix_s)),
            np.concatenate((self.prefill_tokens, other.prefill_tokens)),
            np.concatenate((self.tpot_s, other.tpot_s)),
            np.concatenate((self.context_tokens, other.context_tokens)),
            np.concatenate((self.blocks, other.blocks)),
            np.concatenate((self.value, other.value)),
        )


class TightestOffered:
    """The tightest TPOT offered within the last LATELY_S, which may come again; the loose one where
    there is none.

    A request whose TPOT no batch can keep shortens the batches of other requests for no longer than
    that.
    """

    def __init__(self) -> None:
        # (offered, TPOT), with TPOT rising: an older one that is no tighter is dropped
        self._rising = deque[tuple[float, float]]()

    def offered(self, tpot_s: float, now_unix_s: float) -> None:
        while self._rising and self._rising[-1][1] >= tpot_s:
            self._rising.pop()
        self._rising.append((now_unix_s, tpot_s))

    def at(self, now_unix_s: float) -> float:
        while self._rising and self._rising[0][0] < now_unix_s - LATELY_S:
            self._rising.popleft()
        return min(LOOSE_TPOT_S, self._rising[0][1]) if self._rising else LOOSE_TPOT_S


class Lengths:
    """Learned output lengths: the tokens still expected of a request, and the longest output
    expected of an application.
    """

    def __init__(self) -> None:
        self._left = LengthDistributions()
        self._most = OutputLengths()

    def observe(self, ended: Ended) -> None:
        self._left.observe(ended)
        self._most.observe(ended)

    def left(self, prompt_tokens: Ints, max_tokens: Ints, generated_tokens: Ints) -> Floats:
        """Tokens expected to come. An output longer than all that ended is expected to double, or
        to reach the prior if that is more.
        """
        left = self._left.left(prompt_tokens, max_tokens, generated_tokens)
        unknown = left >= max_tokens - generated_tokens
        guess = np.maximum(PRIOR_TOKENS - generated_tokens, generated_tokens)
        known: Floats = np.where(unknown, np.minimum(left, guess), left)
        return known

    def most(self, applications: Sequence[str]) -> Floats:
        return self._most.upper(applications)


class PromptPrices:
    """Prompt tokens, plus as many more as take the time of their attention and of their chunks'
    fixed cost. Prices are kept while the profile stays as it is. Where a token costs next to
    nothing, prompts have no price beyond their tokens.
    """

    def __init__(self) -> None:
        self._one_s = 0.0
        self._more = dict[tuple[int, int], float]()  # [tokens left, cached]

    def priced(self, profile: Profile, tokens: Ints, cached: Ints) -> Floats:
        one_s = token_s(profile.batch_s)
        plain = tokens.astype(np.float64)
        if one_s <= 0:
            return plain
        if one_s != self._one_s or len(self._more) > MOST_PRICES:
            self._one_s, self._more = one_s, {}
        more = []
        for asked in zip(tokens.tolist(), cached.tolist(), strict=True):
            price = self._more.get(asked)
            if price is None:
                price = self._more[asked] = self._of(profile, *asked)
            more.append(price)
        priced: Floats = plain + np.maximum(np.array(more, dtype=np.float64), 0.0)
        return priced

    def _of(self, profile: Profile, left: int, has: int) -> float:
        chunk = min(left, CHUNK_TOKENS)
        attention = BatchShape(left, 1, left * chunk, left * (has + (left - chunk) / 2), has)
        return (profile.batch_s(attention) - profile.batch_s(BatchShape(left))) / self._one_s


class Paces(NamedTuple):
    """The bounds of several requests, in columns."""

    due_unix_s: Floats  # when the prefill must have ended; now for a decode
    tpot_s: Floats


def paces_of_rows(view: View, rows: Rows, lengths: Lengths) -> Paces:
    """The bounds of standard requests that the replica holds."""
    decodes = view.in_decode[rows]
    due = np.minimum(
        np.minimum(view.next_due_unix_s[rows], view.last_due_unix_s[rows]),
        view.start_unix_s + FAR_S,
    )
    tpot = np.minimum(view.tightest_tbt_s[rows], LOOSE_TPOT_S)
    whole = view.has_ttlt[rows].nonzero()[0]
    if len(whole):
        of = rows[whole]
        generated, most = view.generated_tokens[of], view.max_tokens[of]
        upper = np.minimum(lengths.most(view.applications)[view.application[of]], most)
        tokens_left = np.maximum(upper - generated, 1.0)
        last_due = view.last_due_unix_s[of]
        share = np.minimum(
            tpot[whole], (last_due - view.arrived_unix_s[of]) / 2 / np.maximum(upper, 1.0)
        )
        due[whole] = np.minimum(due[whole], last_due - share * tokens_left)
        pace = (last_due - view.start_unix_s) / tokens_left
        # also where the time is over already: batches would have a negative length
        lost = pace < view.profile.batch_s(BatchShape(decodes=1))
        tpot[whole] = np.minimum(
            tpot[whole], np.where(~decodes[whole], share, np.where(lost, np.inf, pace))
        )
    return Paces(np.where(decodes, view.start_unix_s, due), tpot)


def of_rows(view: View, rows: Rows, lengths: Lengths, prices: PromptPrices) -> Demands:
    """The demands of standard requests that the replica holds. A decode has 0 prefill tokens."""
    paces = paces_of_rows(view, rows, lengths)
    decodes = view.in_decode[rows]
    left = lengths.left(
        view.prompt_tokens[rows], view.max_tokens[rows], view.generated_tokens[rows]
    )
    has = view.top_tokens[rows]
    stands = np.where(decodes, has, view.target_tokens[rows]).astype(np.float64)
    prefill = np.zeros(len(rows))
    begins = (~decodes & (view.target_tokens[rows] > view.computed_tokens[rows])).nonzero()[0]
    cached = view.computed_tokens[rows[begins]]
    prefill[begins] = prices.priced(view.profile, view.target_tokens[rows[begins]] - cached, cached)
    return Demands(
        paces.due_unix_s,
        prefill,
        paces.tpot_s,
        stands + left / 2,
        np.ceil((stands + left) / view.block_tokens).astype(np.int64),
        view.importance[rows],
    )


def of_offers(
    view: View, offers: Sequence[Offer], lengths: Lengths, prices: PromptPrices
) -> Demands:
    """The demands of standard requests that are offered or promised."""
    prompt = np.array([offer.prompt_tokens for offer in offers], dtype=np.int32)
    generated = np.array([offer.generated_tokens for offer in offers], dtype=np.int32)
    most = np.array([offer.max_tokens for offer in offers], dtype=np.int32)
    left = lengths.left(prompt, most, generated)
    upper = np.minimum(lengths.most([offer.application for offer in offers]), most)
    due, tpot = np.empty(len(offers)), np.empty(len(offers))
    for n, offer in enumerate(offers):
        due[n], tpot[n] = _bounds(offer, view.start_unix_s, float(upper[n]))
    tokens = prompt + generated
    cached = np.array([offer.cached_tokens for offer in offers], dtype=np.int32)
    stands = tokens.astype(np.float64)
    return Demands(
        due,
        prices.priced(view.profile, tokens - cached, cached),
        tpot,
        stands + left / 2,
        np.ceil((stands + left) / view.block_tokens).astype(np.int64),
        np.array([offer.importance for offer in offers], dtype=np.float64),
    )


def _bounds(offer: Offer, now_unix_s: float, upper_tokens: float) -> tuple[float, float]:
    """The instant by which the prefill must have ended, and the TPOT after that."""
    slo = offer.slo
    tpot_s = min(
        LOOSE_TPOT_S,
        *[tbt_s for tbt_s in (slo.tbt_s, slo.thinking_tbt_s) if tbt_s is not None],
        math.inf,
    )
    first = slo.first_due_unix_s(offer.arrived_unix_s) if offer.generated_tokens == 0 else math.inf
    due = min(offer.next_due_unix_s, first, now_unix_s + FAR_S)
    if slo.ttlt_s is not None:
        tpot_s = min(tpot_s, slo.ttlt_s / 2 / max(upper_tokens, 1.0))
        due = min(
            due,
            slo.last_due_unix_s(offer.arrived_unix_s)
            - tpot_s * max(upper_tokens - offer.generated_tokens, 1.0),
        )
    return due, tpot_s
