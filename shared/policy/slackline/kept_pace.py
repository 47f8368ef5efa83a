"""The tightest pace that is kept: a pace may cost more requests than have it.

The decodes run once in each tightest pace, and each time the fixed part of a batch is paid. So the
tighter the pace, the less of the time is left for the work itself. Of the paces that lately came,
the tightest is kept unless with a looser one WORTH times as many requests can be served: those of
this pace and of looser ones, as far as the time left suffices for them, the most valuable for their
time first. Offers of a tighter pace are declined then; what was taken before keeps its pace.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from shared.policy.seam import Bools, Floats
from shared.policy.slackline.due import LOOSE_S
from shared.schemas import Offer
from shared.vocabulary import Definition, RequestKey

FADES_S = 20.0  # in which what came counts for 1/e
# Of the time so much is usable: arrivals are uneven, and a prompt holds up the pass beside it.
USABLE = 0.85
# By so many times more must be served with the tightest pace given up.
WORTH = 2.0
# Of what drafts bring in the mean, so much counts where each ten tokens are to keep a pace.
SURE = 0.3
KNOWN = 4096  # requests, of which none is counted twice
DIGITS = 4  # of a pace in seconds, so that paces close to each other count as one
KINDS = 64  # of paces; while so many are known, others are not counted


class Pace(NamedTuple):
    """A pace in seconds; inf: none. `windows`: each ten tokens are to keep it."""

    tbt_s: float
    windows: bool

    def passes_share(self, pass_s: float, speed: float) -> float:
        """The share of the time that passes in this pace take, without their decodes. `pass_s`,
        `speed`: as in `Demand.kept_s`.
        """
        sure = 1.0 + SURE * (speed - 1.0) if self.windows else speed
        return pass_s / sure / self.tbt_s


class Demand:
    """The requests with a TTFT or a pace that were lately offered here first: each replica of a
    fleet has its part of them. A TTLT leaves time to wait for better days, so those that have one
    are not counted.
    """

    def __init__(self) -> None:
        self._by_pace: dict[Pace, list[float]] = {}  # importance, seconds of prefill, of decoding
        self._began_unix_s = self._at_unix_s = math.inf
        self._known: dict[RequestKey, None] = {}

    def offered(
        self, offers: Sequence[Offer], now_unix_s: float, prefill_s: Floats, decoding_s: Floats
    ) -> None:
        """`prefill_s`, `decoding_s`: [offers] seconds of full batches, by this replica's prices."""
        self.fade(now_unix_s)
        for offer, *seconds in zip(offers, prefill_s.tolist(), decoding_s.tolist(), strict=True):
            pace = pace_of(offer)
            undated = math.isinf(pace.tbt_s) and offer.slo.ttft_s is None
            pace = pace._replace(tbt_s=round(min(pace.tbt_s, LOOSE_S), DIGITS))
            full = len(self._by_pace) >= KINDS and pace not in self._by_pace
            again = offer.attempt > 1 or offer.key in self._known
            if again or offer.slo.ttlt_s is not None or undated or full:
                continue
            self._known[offer.key] = None
            if len(self._known) > KNOWN:
                del self._known[next(iter(self._known))]
            kind = self._by_pace.setdefault(pace, [0.0, 0.0, 0.0])
            for n, more in enumerate((offer.importance, *seconds)):
                kind[n] += more

    @property
    def kinds(self) -> int:
        """The number of paces that lately came."""
        return len(self._by_pace)

    def kept_s(self, now_unix_s: float, pass_s: float, speed: float) -> float:
        """The pace in seconds; 0: every one. `pass_s`: the fixed part of a batch. `speed`: drafts
        bring so many times the tokens in the same time.
        """
        self.fade(now_unix_s)
        seen_s = FADES_S * (1 - math.exp(-max(now_unix_s - self._began_unix_s, 1.0) / FADES_S))
        paces = sorted(self._by_pace)
        kinds = [
            (value, (prefill_s + decoding_s / speed) / seen_s)
            for value, prefill_s, decoding_s in map(self._by_pace.__getitem__, paces)
        ]
        kept_s, most = 0.0, -1.0
        for n, pace in enumerate(paces):
            count = _served(max(USABLE - pace.passes_share(pass_s, speed), 0.0), kinds[n:])
            if count > WORTH * most:
                kept_s, most = (pace.tbt_s if n else 0.0), count
        return kept_s

    def fade(self, now_unix_s: float) -> None:
        """Lets all that came count for less, by the time since the last call."""
        if math.isinf(self._at_unix_s):
            self._began_unix_s = self._at_unix_s = now_unix_s
        faded = math.exp(min(self._at_unix_s - now_unix_s, 0.0) / FADES_S)
        self._at_unix_s = max(self._at_unix_s, now_unix_s)
        for pace, kind in list(self._by_pace.items()):
            kind[:] = [part * faded for part in kind]
            if kind[0] < 0.01:
                del self._by_pace[pace]


def _served(left: float, kinds: Sequence[tuple[float, float]]) -> float:
    """The value that is served in so much of the time, of these kinds (value, share of the time),
    those of the most value for their time first.
    """
    value = 0.0
    for worth, share in sorted(kinds, key=lambda kind: -kind[0] / max(kind[1], 1e-9)):
        value += worth * min(1.0, left / max(share, 1e-9))
        left = max(left - share, 0.0)
    return value


def pace_of(offer: Offer) -> Pace:
    """Its tightest pace."""
    windows = offer.slo.definition is Definition.MAX_TPOT_10
    return Pace(offer.slo.tightest_pace_s(offer.thinking), windows)


def too_tight(tightest_tbt_s: Floats, kept_s: float) -> Bools:
    """A mask of the paces that are tighter than the one that is kept."""
    mask: Bools = tightest_tbt_s < kept_s - 0.5 * 10**-DIGITS
    return mask
