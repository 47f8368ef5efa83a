"""The tightest pace that is kept: a pace may cost more requests than have it.

The decodes run once in each tightest pace, and each time the fixed part of a batch is paid. So the
tighter the pace, the less of the time is left for the work itself. What a pace serves if it is the
tightest is reckoned: the requests of this pace and of looser ones, as far as the time left suffices
for them, the most valuable for their time first. The reckoning knows little of uneven arrivals and
of time earned. So what the kept pace serves is no less than what was lately taken under it.

The tightest pace is kept that no looser one outdoes. Offers of a tighter one are declined; what was
taken before keeps its pace.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from shared.policy.lengths import OutputLengths
from shared.policy.seam import Bools, Floats
from shared.policy.slackline.due import EARNING, LOOSE_S, can_wait
from shared.schemas import Offer
from shared.vocabulary import Definition, RequestKey

# What came counts for 1/e after so many seconds, or after so many more requests.
FADES_S, FADES_REQUESTS = 20.0, 100
# Of the time so much is usable: arrivals are uneven, and a prompt holds up the pass beside it.
USABLE = 0.85
# A pace outdoes a tighter one if it serves so many times as much.
MORE = 1.03
# Where less than so much of what came was taken, it is enough that the reckoning has it serve so
# many times as much: it may be too low for both.
LOSING, MUCH_MORE = 0.5, 2.0
# Of what drafts bring in the mean, so much counts where each ten tokens are to keep a pace.
SURE = 0.3
# A pace below so many times the fixed part of a batch needs drafts.
NEEDED = 1.7
KNOWN = 4096  # requests, of which none is counted twice
DIGITS = 4  # of a pace in seconds, so that paces close to each other count as one
KINDS = 64  # of paces and applications; while so many are known, others are not counted


class Pace(NamedTuple):
    """A pace in seconds; inf: none. `windows`: each ten tokens are to keep it. `early_s`: deadlines
    judge, and the first token may come so long before it is due.
    """

    tbt_s: float
    windows: bool
    early_s: float = 0.0

    def eased(self, output_tokens: float) -> "Pace":
        """The pace with the time that so many tokens earn (due.py); 0: nobody knows how many."""
        earned_s = self.early_s / output_tokens if output_tokens else 0.0
        return Pace(round(min(self.tbt_s + earned_s, LOOSE_S), DIGITS), self.windows)

    def passes_share(self, pass_s: float, speed: float) -> float:
        """The share of the time that passes in this pace take, without their decodes. `pass_s`,
        `speed`: as in `Demand.kept_s`.
        """
        sure = 1.0 + SURE * (speed - 1.0) if self.windows else speed
        return pass_s / sure / self.tbt_s

    def unsure(self, pass_s: float, speed: float) -> bool:
        """Tells whether what is taken may well not keep it: windows are to, and drafts have to
        help.
        """
        return self.windows and speed > 1.0 and self.tbt_s < NEEDED * pass_s


class Demand:
    """The requests with a TTFT or a pace that were lately offered here first: each replica of a
    fleet has its part of them. Those that can wait for better days (due.py) are not counted.
    """

    def __init__(self) -> None:
        # importance; seconds of prefill, and of one token of each
        self._kinds: dict[tuple[Pace, str], list[float]] = {}
        self._taken = 0.0  # importance
        self._seen_s = 1.0  # in which all that came; a second more than were seen
        self._at_unix_s = math.inf
        self._kept_s = 0.0
        self._known: dict[RequestKey, None] = {}

    def offered(
        self, offers: Sequence[Offer], now_unix_s: float, prefill_s: Floats, decode_s: Floats
    ) -> None:
        """`prefill_s`, `decode_s`: [offers] seconds of full batches, by this replica's prices, of
        all of its prefill and of one token of its decode.
        """
        self.fade(now_unix_s)
        for offer, *seconds in zip(offers, prefill_s.tolist(), decode_s.tolist(), strict=True):
            pace = pace_of(offer)
            kind = pace._replace(tbt_s=round(min(pace.tbt_s, LOOSE_S), DIGITS)), offer.application
            full = len(self._kinds) >= KINDS and kind not in self._kinds
            if not counts(offer) or offer.attempt > 1 or offer.key in self._known or full:
                continue
            self._known[offer.key] = None
            if len(self._known) > KNOWN:
                del self._known[next(iter(self._known))]
            self._forget(1 - 1 / FADES_REQUESTS)
            sums = self._kinds.setdefault(kind, [0.0, 0.0, 0.0])
            for n, more in enumerate((offer.importance, *seconds)):
                sums[n] += more

    def taken(self, importance: float, now_unix_s: float) -> None:
        """Requests that count were taken, of so much importance together; below 0: they have given
        way since.
        """
        self.fade(now_unix_s)
        self._taken = max(self._taken + importance, 0.0)

    @property
    def paces(self) -> int:
        """The number of paces that lately came."""
        return len({pace for pace, _ in self._kinds})

    def kept_s(
        self, now_unix_s: float, pass_s: float, speed: float, lengths: OutputLengths
    ) -> float:
        """The pace in seconds; 0: every one. `pass_s`: the fixed part of a batch. `speed`: drafts
        bring so many times the tokens in the same time. Outputs are expected as long as the mean of
        `lengths`, and not to take any time while that is unknown.
        """
        self.fade(now_unix_s)
        paces, kinds = self._by_pace(speed, lengths)
        if not paces:
            return 0.0
        reckoned = [
            _served(max(USABLE - pace.passes_share(pass_s, speed), 0.0), kinds[n:])
            for n, pace in enumerate(paces)
        ]
        now = self._now(paces)
        unsure = paces[now].unsure(pass_s, speed)
        serves = list(reckoned)
        if not unsure:
            serves[now] = max(serves[now], self._taken)
        losing = unsure or self._taken < LOSING * sum(value for value, _ in kinds)
        best = 0
        for n in range(1, len(paces)):
            outdone = serves[n] > MORE * serves[best] and not unsure
            if outdone or (losing and reckoned[n] > MUCH_MORE * reckoned[best]):
                best = n
        self._kept_s = paces[best].tbt_s if best else 0.0
        return self._kept_s

    def _now(self, paces: Sequence[Pace]) -> int:
        """The place of the pace that is kept. Outputs may be longer now than when it was chosen, so
        it is the nearest.
        """
        if not self._kept_s:
            return 0
        return min(range(len(paces)), key=lambda n: abs(math.log(paces[n].tbt_s / self._kept_s)))

    def _by_pace(
        self, speed: float, lengths: OutputLengths
    ) -> tuple[list[Pace], list[tuple[float, float]]]:
        """The paces, the tightest first, and of each the value of its requests and the share of the
        time that they take.
        """
        means = lengths.mean([application for _, application in self._kinds]).tolist()
        found: dict[Pace, tuple[float, float]] = {}
        for (pace, _), (more, prefill_s, decode_s), mean in zip(
            self._kinds, self._kinds.values(), means, strict=True
        ):
            eased = pace.eased(mean)
            value, share = found.get(eased, (0.0, 0.0))
            share += (prefill_s + decode_s * mean / speed) / self._seen_s
            found[eased] = value + more, share
        paces = sorted(found)
        return paces, [found[pace] for pace in paces]

    def fade(self, now_unix_s: float) -> None:
        """Lets all that came count for less, by the time since the last call."""
        if math.isinf(self._at_unix_s):
            self._at_unix_s = now_unix_s
        faded = math.exp(min(self._at_unix_s - now_unix_s, 0.0) / FADES_S)
        self._forget(faded)
        self._seen_s += FADES_S * (1 - faded)
        self._at_unix_s = max(self._at_unix_s, now_unix_s)

    def _forget(self, faded: float) -> None:
        self._taken *= faded
        self._seen_s *= faded
        for kind, sums in list(self._kinds.items()):
            sums[:] = [part * faded for part in sums]
            if sums[0] < 0.01:
                del self._kinds[kind]


def counts(offer: Offer) -> bool:
    """Tells whether it has a TTFT or a pace, and cannot wait."""
    if can_wait(offer.slo):
        return False
    return offer.slo.ttft_s is not None or math.isfinite(pace_of(offer).tbt_s)


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
    slo, ttft_s = offer.slo, offer.slo.ttft_s or 0.0
    early_s = ttft_s if slo.definition in EARNING else 0.0
    tbt_s = slo.tightest_pace_s(offer.thinking)
    return Pace(tbt_s, slo.definition is Definition.MAX_TPOT_10, early_s)


def too_tight(tightest_tbt_s: Floats, kept_s: float) -> Bools:
    """A mask of the paces that are tighter than the one that is kept."""
    mask: Bools = tightest_tbt_s < kept_s - 0.5 * 10**-DIGITS
    return mask
