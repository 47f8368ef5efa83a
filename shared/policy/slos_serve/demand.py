"""What requests ask of a replica as SLOs-Serve counts it (section 3.2.1): prefill tokens by a
deadline, a TPOT then, memory, a value.

The paper's requests have a TTFT and a TPOT. Ours may have other bounds, and are read so:
- *TPOT* is the tightest TBT of the stages still to come (section 3.2.1, multi-decode SLOs). A
  request without one has that of the loose tier (Table 3): nobody holds KV for ever.
- *TTLT*: its decode is to take at most half of the whole time, so TPOT is no looser than that over
  the output expected at most (mean and two deviations of its application); prefill must end so much
  before the last token is due that the output fits behind it. A decode's TPOT is the time left over
  the tokens left. Where no iteration is so short, it is beyond rescue and has the loose TPOT.
- *No deadline for the prefill* means within FAR_S.
- *Memory*: the paper knows decode lengths (section 6). Here they are learned: prompt and what is
  expected of the output, given how long it already is. Requests are not taken for as long as
  `max_tokens` allows: callers ask for far more than comes.
- *Prefill tokens* are those left, and for attention and the fixed cost of a chunk, which the
  paper's performance model leaves out, as many more as take that long (the profile says how long).
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
from shared.policy.chunk import DECODE, Rows
from shared.policy.lengths import PRIOR_TOKENS, OutputLengths
from shared.policy.seam import Ended, Floats, View
from shared.policy.sola.output_lengths import LengthDistributions
from shared.schemas import Offer

# Table 3, loose.
LOOSE_TPOT_S = 0.1
# Ours: a prefill without a deadline is planned to end within this.
FAR_S = 3600.0
# Ours: how long a TPOT is expected again after it was last offered.
LATELY_S = 60.0
# Ours: the chunk that prompts are thought to be cut into when their attention is priced, and the
# tokens over which one more is.
CHUNK_TOKENS = 512


class Demands(NamedTuple):
    """Columns run along requests. `due_unix_s`: when the prefill must have ended."""

    due_unix_s: Floats
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

    Who asks for what no batch keeps shortens the batches that others wait for no longer than that.
    """

    def __init__(self) -> None:
        # (offered, TPOT): none is followed by one as tight
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
    """What is learned of outputs: how many tokens are still expected, and how many an application's
    has at most.
    """

    def __init__(self) -> None:
        self._left = LengthDistributions()
        self._most = OutputLengths()

    def observe(self, ended: Ended) -> None:
        self._left.observe(ended)
        self._most.observe(ended)

    def left(self, prompt_tokens: Ints, max_tokens: Ints, generated_tokens: Ints) -> Floats:
        """Tokens expected to come. Of one longer than all that ended: as many again as it has, or
        more if the prior leaves more.
        """
        left = self._left.left(prompt_tokens, max_tokens, generated_tokens)
        unknown = left >= max_tokens - generated_tokens
        guess = np.maximum(PRIOR_TOKENS - generated_tokens, generated_tokens)
        known: Floats = np.where(unknown, np.minimum(left, guess), left)
        return known

    def most(self, applications: Sequence[str]) -> Floats:
        return self._most.upper(applications)


def of_rows(view: View, rows: Rows, lengths: Lengths) -> Demands:
    """Of standard requests that the replica holds. For those that decode, prefill tokens are 0 and
    the deadline is now.
    """
    decodes = view.phase[rows] == DECODE
    generated, most = view.generated_tokens[rows], view.max_tokens[rows]
    left = lengths.left(view.prompt_tokens[rows], most, generated)
    has = view.computed_tokens[rows] + view.unsure_tokens[rows]
    stands = np.where(decodes, has, view.target_tokens[rows]).astype(np.float64)
    due = np.minimum(
        np.minimum(view.next_due_unix_s[rows], view.last_due_unix_s[rows]),
        view.start_unix_s + FAR_S,
    )
    tpot = np.minimum(view.tightest_tbt_s[rows], LOOSE_TPOT_S)
    whole = np.isfinite(view.last_due_unix_s[rows]).nonzero()[0]
    if len(whole):
        of = rows[whole]
        upper = np.minimum(lengths.most(view.applications)[view.application[of]], most[whole])
        tokens_left = np.maximum(upper - generated[whole], 1.0)
        last_due = view.last_due_unix_s[of]
        share = np.minimum(
            tpot[whole], (last_due - view.arrived_unix_s[of]) / 2 / np.maximum(upper, 1.0)
        )
        due[whole] = np.minimum(due[whole], last_due - share * tokens_left)
        pace = (last_due - view.start_unix_s) / tokens_left
        # or over already, which would make batches of less than no time
        lost = pace < view.profile.batch_s(BatchShape(decodes=1))
        tpot[whole] = np.minimum(
            tpot[whole], np.where(~decodes[whole], share, np.where(lost, np.inf, pace))
        )
    prefill = np.where(decodes, 0, view.target_tokens[rows] - view.computed_tokens[rows]).astype(
        np.float64
    )
    begins = (prefill > 0).nonzero()[0]
    prefill[begins] = _priced(
        view.profile, prefill[begins], view.computed_tokens[rows[begins]].astype(np.float64)
    )
    return Demands(
        np.where(decodes, view.start_unix_s, due),
        prefill,
        tpot,
        stands + left / 2,
        np.ceil((stands + left) / view.block_tokens).astype(np.int64),
        view.importance[rows],
    )


def of_offers(view: View, offers: Sequence[Offer], lengths: Lengths) -> Demands:
    """Of standard requests that a replica is asked to take, or has promised to."""
    prompt = np.array([offer.prompt_tokens for offer in offers], dtype=np.int32)
    generated = np.array([offer.generated_tokens for offer in offers], dtype=np.int32)
    most = np.array([offer.max_tokens for offer in offers], dtype=np.int32)
    left = lengths.left(prompt, most, generated)
    upper = np.minimum(lengths.most([offer.application for offer in offers]), most)
    due, tpot = np.empty(len(offers)), np.empty(len(offers))
    for n, offer in enumerate(offers):
        due[n], tpot[n] = _bounds(offer, view.start_unix_s, float(upper[n]))
    stands = (prompt + generated).astype(np.float64)
    return Demands(
        due,
        _priced(view.profile, stands, np.zeros(len(offers))),
        tpot,
        stands + left / 2,
        np.ceil((stands + left) / view.block_tokens).astype(np.int64),
        np.array([offer.importance for offer in offers], dtype=np.float64),
    )


def _bounds(offer: Offer, now_unix_s: float, upper_tokens: float) -> tuple[float, float]:
    """When its prefill must have ended, and its TPOT after that."""
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


def _priced(profile: Profile, tokens: Floats, cached: Floats) -> Floats:
    """Tokens, and as many more as take the time of their attention and of a chunk's beginning."""
    if not len(tokens):
        return tokens
    one_s = (
        profile.batch_s(BatchShape(2 * CHUNK_TOKENS)) - profile.batch_s(BatchShape(CHUNK_TOKENS))
    ) / CHUNK_TOKENS
    if one_s <= 0:
        return tokens
    more = []
    for left, has in zip(tokens.tolist(), cached.tolist(), strict=True):
        chunk = min(left, CHUNK_TOKENS)
        attention = BatchShape(
            int(left), 1, left * chunk, left * (has + (left - chunk) / 2), int(has)
        )
        more.append((profile.batch_s(attention) - profile.batch_s(BatchShape(int(left)))) / one_s)
    priced: Floats = tokens + np.maximum(more, 0.0)
    return priced
