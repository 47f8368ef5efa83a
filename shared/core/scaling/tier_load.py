"""The load of one tier: the work that came in each of the last seconds, and whole answers that are
still owed.
"""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from shared.columns import Indices
from shared.core.scaling.trend import Trend, trend_of
from shared.policy.seam import Floats
from shared.policy.slackline.prices import CHUNK_TOKENS, Prices
from shared.schemas import TierArrivals

KEPT_S = 600  # the seconds that are remembered
# Until outputs have ended, their mean counts as PRIOR_TOKENS, with the weight of PRIOR requests.
PRIOR_TOKENS, PRIOR = 200.0, 10.0
LAST = 1000.0  # means are those of about so many requests
OWED_LIMIT = 512  # groups of whole answers; beyond them the two that are due first are joined


@dataclass(slots=True)
class Owed:
    """Whole answers that came together and have not ended."""

    due_unix_s: float
    requests: int
    work_s: float


@dataclass(slots=True)
class Means:
    """Fading sums over about the last LAST requests, as in TierArrivals."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    prompt_squares: float = 0.0
    due_s: float = 0.0
    paces: float = 0.0
    whole: float = 0.0
    spare_s: float = 0.0
    ended: float = PRIOR
    output_tokens: float = PRIOR * PRIOR_TOKENS

    def add(self, came: TierArrivals) -> None:
        keep = max(0.0, 1.0 - came.requests / LAST)
        self.requests = self.requests * keep + came.requests
        self.prompt_tokens = self.prompt_tokens * keep + came.prompt_tokens
        self.prompt_squares = self.prompt_squares * keep + came.prompt_squares
        self.due_s = self.due_s * keep + came.due_s
        self.paces = self.paces * keep + came.paces
        self.whole = self.whole * keep + came.whole
        self.spare_s = self.spare_s * keep + came.spare_s

    def end(self, output_tokens: int) -> None:
        keep = 1.0 - 1.0 / LAST
        self.ended = self.ended * keep + 1.0
        self.output_tokens = self.output_tokens * keep + output_tokens

    @property
    def output(self) -> float:
        return self.output_tokens / self.ended

    def decode_s(self, prices: Prices) -> float:
        """The seconds of the decodes of one request, beside others."""
        prompt = self.prompt_tokens / self.requests if self.requests else 0.0
        return self.output * (prices.decode_s + prices.context_s * (prompt + self.output / 2))


class TierLoad:
    def __init__(self, began_unix_s: float) -> None:
        self._began_s = self._second = int(began_unix_s)  # the second that is being filled
        # of each second, at its number modulo KEPT_S
        self._prefill: Floats = np.zeros(KEPT_S)
        self._decode: Floats = np.zeros(KEPT_S)
        self._came: Floats = np.zeros(KEPT_S)
        self._means = Means()
        self.owed: deque[Owed] = deque()
        # as of the last `trend`: requests a second, the seconds of prefills and of decodes that
        # come in one, and the variance of those of prefills
        self.rate = self.prefill_s = self.decode_s = self.prefill_variance = 0.0

    # ------------------------------------------------------------ what was heard

    def arrived(self, came: TierArrivals, prices: Prices, now_unix_s: float) -> None:
        self._turn(now_unix_s)
        self._means.add(came)
        prefill_s = (
            prices.token_s * came.prompt_tokens
            + prices.cross_s / 2 * came.prompt_squares
            + prices.chunk_s * (came.requests + came.prompt_tokens / CHUNK_TOKENS)
        )
        decode_s = came.requests * self._means.decode_s(prices)
        self._count(came.requests, prefill_s, decode_s)
        if self.whole and came.requests:
            due_unix_s = now_unix_s + came.due_s / came.requests
            self.owed.append(Owed(due_unix_s, came.requests, prefill_s + decode_s))
            if len(self.owed) > OWED_LIMIT:
                first, second = self.owed.popleft(), self.owed[0]
                second.due_unix_s = first.due_unix_s
                second.requests += first.requests
                second.work_s += first.work_s

    def refused(self, requests: int, now_unix_s: float) -> None:
        """Requests were refused before they were counted: each as much work as those of late."""
        self._turn(now_unix_s)
        came = self._came.sum()
        if came:
            prefill_s, decode_s = self._prefill.sum() / came, self._decode.sum() / came
            self._count(requests, requests * prefill_s, requests * decode_s)

    def ended(self, output_tokens: int) -> None:
        """A request has ended. Of whole answers it counts as the one that was due first."""
        self._means.end(output_tokens)
        if self.owed:
            first = self.owed[0]
            first.work_s -= first.work_s / first.requests
            first.requests -= 1
            if not first.requests:
                self.owed.popleft()

    # ------------------------------------------------------------ what follows

    @property
    def whole(self) -> bool:
        """Its requests owe nothing before their last token."""
        return self._means.whole > self._means.requests / 2

    @property
    def due_s(self) -> float:
        """The mean time within which its work is due."""
        return self._means.due_s / self._means.requests if self._means.requests else math.inf

    @property
    def pace_s(self) -> float:
        """The mean time between two tokens that its requests ask for; inf if none has a pace. The
        slack that early first tokens earn is spread over the output.
        """
        means = self._means
        if not means.paces:
            return math.inf
        return means.requests / means.paces + means.spare_s / means.requests / means.output

    @property
    def tokens(self) -> float:
        """Prompt tokens a second."""
        means = self._means
        return self.rate * means.prompt_tokens / means.requests if means.requests else 0.0

    def longest_s(self, prices: Prices) -> float:
        """The prefill of a request that gives way: the longest do, so each counts by its length."""
        means = self._means
        if not means.prompt_tokens:
            return 0.0
        return prices.token_s * means.prompt_squares / means.prompt_tokens

    def trend(self, now_unix_s: float, ahead_s: float) -> Trend:
        """The trend of its work. Sets `rate` and the seconds of prefills and decodes."""
        self._turn(now_unix_s)
        seconds = self._seconds()
        prefill = self._prefill[seconds]
        if len(seconds):
            self.rate = float(self._came[seconds].mean())
            self.prefill_s, self.prefill_variance = float(prefill.mean()), float(prefill.var())
            self.decode_s = float(self._decode[seconds].mean())
        return trend_of(prefill + self._decode[seconds], ahead_s)

    def _count(self, requests: int, prefill_s: float, decode_s: float) -> None:
        place = self._second % KEPT_S
        self._came[place] += requests
        self._prefill[place] += prefill_s
        self._decode[place] += decode_s

    def _seconds(self) -> Indices:
        """The places of the whole seconds that are remembered, the oldest first."""
        first = max(self._began_s, self._second - KEPT_S + 1)
        return np.arange(first, self._second) % KEPT_S

    def _turn(self, now_unix_s: float) -> None:
        """A new second begins; in those of which nothing was heard nothing came."""
        second = int(now_unix_s)
        for each in range(max(self._second, second - KEPT_S) + 1, second + 1):
            for column in (self._prefill, self._decode, self._came):
                column[each % KEPT_S] = 0.0
        self._second = max(self._second, second)
