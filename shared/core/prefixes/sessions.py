"""Learns which sessions go on at a replica, and when: so how long the KV of a request is to stay
there once it has ended.

A session goes on if another request of it comes, after a gap. One that goes to another replica
does not: KV here is of no use to it. A tenant's applications of one name are alike.
"""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

from shared.core.shared_room import Shares
from shared.perf.iteration_time import Profile
from shared.perf.zero_load import CHUNK_TOKENS, ttft_s
from shared.schemas import Offer

SESSIONS = 4096  # that are remembered
APPLICATIONS = 256
LONGEST_S = 300.0  # a session that was silent for longer has ended
LAST = 64  # sessions of an application that count
LEAST = 8  # fewer tell nothing
LIKELY = 0.5  # of these, that must have gone on
UPPER = 0.9  # of the gaps are no longer than what is kept
SLACK = 0.2  # of a TTFT, that the next round has for its prompt: others wait, too

Session = tuple[str, str, str]  # tenant, application, session


@dataclass(slots=True)
class _Application:
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=LAST))
    went_on: deque[bool] = field(default_factory=lambda: deque(maxlen=LAST))

    def keep_s(self) -> float:
        """The upper quantile of the gaps; 0: no next round is likely."""
        if len(self.went_on) < LEAST or sum(self.went_on) < LIKELY * len(self.went_on):
            return 0.0
        gaps_s = sorted(self.gaps_s)
        return gaps_s[int(UPPER * (len(gaps_s) - 1))]


@dataclass(slots=True)
class _Session:
    seen_unix_s: float
    ended_unix_s: float | None = None  # None: a request of it is here
    kept_tokens: int = 0  # that count against its tenant's share
    keep_s: float = 0.0
    until_unix_s: float = math.inf


class Sessions:
    """The sessions of one replica with this profile. Each tenant has at most its share of the KV
    kept for sessions, by its weight beside others that have any.
    """

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._sessions: OrderedDict[Session, _Session] = OrderedDict()  # by when they were seen
        self._applications: OrderedDict[tuple[str, str], _Application] = OrderedDict()
        self._kv_tokens, self._shares = 0, Shares(0)
        self._until: list[tuple[float, Session]] = []  # heap: what is kept no longer than until

    def arrives(self, offer: Offer, now_unix_s: float) -> None:
        """A request is offered."""
        name = _session_of(offer)
        if name is None:
            return
        self._forget(now_unix_s)
        known = self._sessions.get(name)
        if known is None:
            self._sessions[name] = _Session(now_unix_s)
            if len(self._sessions) > SESSIONS:
                self._drop()
            return
        self._sessions.move_to_end(name)
        known.seen_unix_s = now_unix_s
        if known.ended_unix_s is not None:
            learned = self._application(name)
            learned.gaps_s.append(now_unix_s - known.ended_unix_s)
            learned.went_on.append(True)
            known.ended_unix_s = None

    def keep_s(self, offer: Offer, kv_tokens: int) -> float:
        """The seconds for which the KV of a request that was accepted is to stay longer than others
        once it has ended. `kv_tokens`: of the replica.
        """
        name, ttft_slo_s = _session_of(offer), offer.slo.ttft_s
        known = None if name is None else self._sessions.get(name)
        if name is None or known is None or ttft_slo_s is None:
            return 0.0
        if kv_tokens != self._kv_tokens:
            self._kv_tokens, self._shares = kv_tokens, Shares(kv_tokens)
            for each in self._sessions.values():
                each.kept_tokens = 0
        self._give_back(name[0], known)
        keep_s, tokens = self._application(name).keep_s(), offer.prompt_tokens
        if not keep_s or not self._shares.fits(name[0], offer.weight, tokens):
            return 0.0
        if ttft_s(self._profile, tokens, CHUNK_TOKENS) <= SLACK * ttft_slo_s:
            return 0.0
        self._shares.take(name[0], offer.weight, tokens)
        known.kept_tokens, known.keep_s, known.until_unix_s = tokens, keep_s, math.inf
        return keep_s

    def ended(self, offer: Offer, now_unix_s: float) -> None:
        """A request has left."""
        name = _session_of(offer)
        known = None if name is None else self._sessions.get(name)
        if name is None or known is None:
            return
        known.ended_unix_s = known.seen_unix_s = now_unix_s
        self._sessions.move_to_end(name)
        if known.kept_tokens:
            known.until_unix_s = now_unix_s + known.keep_s
            heappush(self._until, (known.until_unix_s, name))

    def _forget(self, now_unix_s: float) -> None:
        """Blocks that were kept for long enough count no more, and a session that was silent for
        too long has ended.
        """
        while self._until and self._until[0][0] <= now_unix_s:
            name = heappop(self._until)[1]
            known = self._sessions.get(name)
            if known is not None and known.until_unix_s <= now_unix_s:
                self._give_back(name[0], known)
        while self._sessions:
            oldest = next(iter(self._sessions.values()))
            if oldest.seen_unix_s + LONGEST_S > now_unix_s:
                return
            self._drop()

    def _drop(self) -> None:
        name, known = self._sessions.popitem(last=False)
        self._give_back(name[0], known)
        if known.ended_unix_s is not None:
            self._application(name).went_on.append(False)

    def _give_back(self, tenant: str, known: _Session) -> None:
        if known.kept_tokens:
            self._shares.give(tenant, known.kept_tokens)
            known.kept_tokens = 0

    def _application(self, name: Session) -> _Application:
        key = name[:2]
        learned = self._applications.setdefault(key, _Application())
        self._applications.move_to_end(key)
        if len(self._applications) > APPLICATIONS:
            self._applications.popitem(last=False)
        return learned


def _session_of(offer: Offer) -> Session | None:
    """The session of a request that begins here; None if it has none, or comes from elsewhere."""
    if not offer.session or offer.left:
        return None
    return offer.key.partition(".")[0], offer.application, offer.session
