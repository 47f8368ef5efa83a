"""The time accounting of one replica: what each request spent its time on, iteration by iteration.
The worker feeds it as it runs, a reader of the ack log from the log. Sans-IO.

An iteration adds to totals of the replica, so it costs the same however many requests ran. A
request's account takes from the totals when it begins to wait, run or sit out, or when asked.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from shared.request_timeline import (
    TOO_LATE,
    Account,
    Happened,
    Happening,
    Late,
    Neighbour,
    RequestTimeline,
    merged,
)
from shared.schemas import Held

FLOWS = 64  # pairs of tenant and tier counted by name; the rest count as one
REST = ("", "")
NOTICED_S = 1e-6  # shorter times come of rounding


class Spent(NamedTuple):
    """The seconds of an iteration. Prefills took those that neither decodes nor drafts took."""

    ended_unix_s: float
    exec_s: float
    decodes_s: float
    drafts_s: float


class Chunk(NamedTuple):
    """A slot's prefill in one iteration. `last`: the prefill is complete."""

    slot: int
    tokens: int
    last: bool


class _Totals(NamedTuple):
    """Seconds since the accounting began."""

    prefills_s: float
    decodes_s: float
    drafts_s: float
    control_s: float


NOTHING = _Totals(0.0, 0.0, 0.0, 0.0)


@dataclass(slots=True)
class _Flow:
    """The prefills of one tenant and tier."""

    seconds: float = 0.0
    begun: int = 0
    under_way: int = 0


@dataclass(slots=True)
class _Page:
    """A held request. `before`: its timeline when it came. The seconds are counted since then."""

    flow: tuple[str, str]
    before: RequestTimeline
    came_unix_s: float
    began: bool
    best_effort: bool
    happenings: list[Happening]
    # the totals of each flow when the request came: seconds, and prefills that were over
    flows: dict[tuple[str, str], tuple[float, int]]
    since: _Totals | None = None  # the totals that are in the sums; None before its first iteration
    runs: bool = False
    prefills: bool = False
    own_s: float = 0.0  # of its own prefill since `since`
    starts: int = 0  # how often its own prefill began
    queue_s: float = 0.0
    relegated_s: float = 0.0
    prefill_s: float = 0.0
    beside_s: float = 0.0
    decodes_s: float = 0.0
    drafts_s: float = 0.0
    sat_out_s: float = 0.0
    control_s: float = 0.0
    late: Late | None = None

    def spend(self, prefills_s: float, decodes_s: float, drafts_s: float) -> None:
        """Add the seconds of iterations to the causes that the request's part in them gives."""
        if self.runs:
            self.prefill_s += self.own_s
            self.beside_s += max(0.0, prefills_s - self.own_s)
            self.decodes_s += decodes_s
            self.drafts_s += drafts_s
        elif self.best_effort:
            self.relegated_s += prefills_s + decodes_s + drafts_s
        elif self.began:
            self.sat_out_s += prefills_s + decodes_s + drafts_s
        else:
            self.queue_s += prefills_s + decodes_s + drafts_s
        self.own_s = 0.0

    def settle(self, totals: _Totals) -> None:
        """Add the time since the last change to the request's account."""
        if self.since is None:
            return
        passed = [now - then for now, then in zip(totals, self.since, strict=True)]
        self.spend(*passed[:3])
        self.control_s += passed[3]
        self.since = totals


@dataclass(slots=True)
class TimeAccounting:
    """The accounts of all held requests, by slot. Calls come in the order of time."""

    replica: str
    _pages: dict[int, _Page] = field(default_factory=dict)
    _new: list[int] = field(default_factory=list)  # slots that saw no iteration yet
    _flows: dict[tuple[str, str], _Flow] = field(default_factory=dict)
    _totals: _Totals = NOTHING
    _mark_unix_s: float = 0.0  # the instant until which the totals are complete
    _ran: Sequence[int] = ()  # the slots of the last iteration

    def held(self, held: Held, timeline: RequestTimeline) -> None:
        """The replica took in a request; `timeline` tells of the time before that."""
        page = self._open(held, timeline, held.at_unix_s)
        page.best_effort = held.best_effort
        self._note(page, Happened.HELD, held.at_unix_s)

    def found(self, held: Held, timeline: RequestTimeline) -> None:
        """A snapshot has the request, with its timeline."""
        page = self._open(held, timeline, timeline.account.until_unix_s)
        page.began, page.best_effort = _began(timeline), _best_effort(timeline)

    def _open(self, held: Held, timeline: RequestTimeline, at_unix_s: float) -> _Page:
        if not self._pages:
            self._mark_unix_s = max(self._mark_unix_s, at_unix_s)
        flow = (held.key.partition(".")[0], held.tier)
        if flow not in self._flows and len(self._flows) >= FLOWS:
            flow = REST
        self._flows.setdefault(flow, _Flow())
        over = {whose: (f.seconds, f.begun - f.under_way) for whose, f in self._flows.items()}
        page = self._pages[held.slot] = _Page(flow, timeline, at_unix_s, False, False, [], over)
        self._new.append(held.slot)
        return page

    def note(self, what: Happened, slots: Iterable[int], at_unix_s: float) -> None:
        for slot in slots:
            page = self._pages.get(slot)
            if page is None:
                continue
            self._note(page, what, at_unix_s)
            if what in (Happened.RELEGATED, Happened.PROMOTED):
                page.settle(self._totals)
                page.best_effort = what is Happened.RELEGATED

    def ran(self, slots: Sequence[int], chunks: Sequence[Chunk], spent: Spent) -> None:
        """An iteration over these slots is over; `chunks` are the prefills in it."""
        window_s = max(0.0, spent.ended_unix_s - self._mark_unix_s)
        exec_s = min(spent.exec_s, window_s)
        scale = exec_s / spent.exec_s if spent.exec_s > 0.0 else 0.0
        drafts_s = min(spent.drafts_s * scale, exec_s)
        rest_s = exec_s - drafts_s
        decodes_s = min(spent.decodes_s * scale, rest_s) if chunks else rest_s
        prefills_s = rest_s - decodes_s
        began_unix_s = spent.ended_unix_s - exec_s
        if slots != self._ran:
            self._change(slots, began_unix_s)
        added = self._compute(chunks, prefills_s)
        before = self._totals
        self._totals = _Totals(
            before.prefills_s + prefills_s,
            before.decodes_s + decodes_s,
            before.drafts_s + drafts_s,
            before.control_s + window_s - exec_s,
        )
        if self._new:
            here = frozenset(slots)
            for slot in self._new:
                page = self._pages.get(slot)
                if page is not None and page.since is None:
                    seen_s = max(0.0, spent.ended_unix_s - page.came_unix_s)
                    part = min(1.0, seen_s / exec_s) if exec_s > 0.0 else 0.0
                    page.control_s += max(0.0, seen_s - exec_s)
                    page.own_s *= part
                    page.runs = slot in here
                    page.spend(prefills_s * part, decodes_s * part, drafts_s * part)
                    if page.runs:
                        self._begin(page, began_unix_s)
                    page.since = self._totals
                    for flow, seconds in added.items():
                        was_s, over = page.flows.get(flow, (0.0, 0))
                        page.flows[flow] = (was_s + seconds * (1.0 - part), over)
            self._new.clear()
        self._mark_unix_s = max(self._mark_unix_s, spent.ended_unix_s)

    def _change(self, slots: Sequence[int], at_unix_s: float) -> None:
        """Note that other requests run than in the last iteration."""
        now = frozenset(slots)
        for slot in now.symmetric_difference(self._ran):
            page = self._pages.get(slot)
            if page is not None and page.since is not None:
                page.settle(self._totals)
                page.runs = slot in now
                if page.runs:
                    self._begin(page, at_unix_s)
        self._ran = slots

    def _begin(self, page: _Page, at_unix_s: float) -> None:
        if not page.began:
            page.began = True
            self._note(page, Happened.BEGAN, at_unix_s)

    def _compute(self, chunks: Sequence[Chunk], prefills_s: float) -> dict[tuple[str, str], float]:
        """Split the seconds among the prefills, by their tokens. Returns each flow's seconds."""
        added: dict[tuple[str, str], float] = {}
        if not chunks:
            return added
        per_token_s = prefills_s / max(1, sum(tokens for _, tokens, _ in chunks))
        for slot, tokens, last in chunks:
            page = self._pages.get(slot)
            if page is None:  # the log's entry with its hold could not be read
                continue
            flow, seconds = self._flows[page.flow], tokens * per_token_s
            flow.seconds += seconds
            page.own_s += seconds
            added[page.flow] = added.get(page.flow, 0.0) + seconds
            if not page.prefills:
                page.prefills = True
                page.starts += 1
                flow.begun += 1
                flow.under_way += 1
            if last:
                self._complete(page)
        return added

    def _complete(self, page: _Page) -> None:
        if page.prefills:
            page.prefills = False
            self._flows[page.flow].under_way -= 1

    # ------------------------------------------------------------ timelines

    def late(self, slot: int, token: int, due_unix_s: float) -> None:
        """The first late token of a request came with the iteration that is over."""
        page = self._pages.get(slot)
        if page is not None and page.late is None and page.before.late is None:
            page.late = Late(
                token=token,
                due_unix_s=due_unix_s,
                came_unix_s=self._mark_unix_s,
                account=self._account(page),
            )

    def timeline(self, slot: int) -> RequestTimeline:
        """The timeline of a request until the end of the last iteration."""
        page = self._pages[slot]
        noted = page.before.noted(*page.happenings)
        return replace(noted, account=self._account(page), late=page.before.late or page.late)

    def leave(self, slot: int) -> RequestTimeline:
        """The request leaves the replica, with its timeline."""
        timeline, page = self.timeline(slot), self._pages.pop(slot)
        self._complete(page)
        return timeline

    def forget(self) -> None:
        """The replica holds nothing any more."""
        for slot in list(self._pages):
            self.leave(slot)

    def _account(self, page: _Page) -> Account:
        page.settle(self._totals)
        seen = page.since is not None
        attempt = Account(
            until_unix_s=max(page.came_unix_s, self._mark_unix_s) if seen else page.came_unix_s,
            queue_s=page.queue_s,
            relegated_s=page.relegated_s,
            prefill_s=page.prefill_s,
            beside_s=page.beside_s,
            decodes_s=page.decodes_s,
            drafts_s=page.drafts_s,
            sat_out_s=page.sat_out_s,
            control_s=page.control_s,
            neighbours=merged(self._neighbours(page)),
        )
        return page.before.then(attempt)

    def _neighbours(self, page: _Page) -> Iterable[Neighbour]:
        for whose, flow in self._flows.items():
            was_s, over = page.flows.get(whose, (0.0, 0))
            own = whose == page.flow
            seconds = flow.seconds - was_s - (page.prefill_s if own else 0.0)
            requests = flow.begun - over - (page.starts if own else 0)
            if requests > 0 and seconds > NOTICED_S:
                yield Neighbour(*whose, requests, seconds)

    def _note(self, page: _Page, what: Happened, at_unix_s: float) -> None:
        """Add a step, in the order of time: an engine's seconds may end before its report comes."""
        last = page.happenings[-1].at_unix_s if page.happenings else page.came_unix_s
        why = TOO_LATE if what is Happened.RELEGATED else ""
        page.happenings.append(
            Happening(at_unix_s=max(last, at_unix_s), what=what, replica=self.replica, why=why)
        )


def _began(timeline: RequestTimeline) -> bool:
    """True if the request has run on the replica that holds it."""
    steps = [h.what for h in timeline.happenings if h.what in (Happened.HELD, Happened.BEGAN)]
    return steps[-1:] == [Happened.BEGAN]


def _best_effort(timeline: RequestTimeline) -> bool:
    classes = (Happened.RELEGATED, Happened.PROMOTED)
    steps = [h.what for h in timeline.happenings if h.what in classes]
    return steps[-1:] == [Happened.RELEGATED]
