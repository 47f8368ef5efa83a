"""QoServe (ASPLOS 2026): dynamic chunking, hybrid priority, eager relegation with hints, selective
preemption (Algorithm 1).

Where the paper leaves room:
- *Load* is the largest ratio, over the queue in deadline order, of the prefill seconds up to a
  request to the seconds it has.
- *Will violate* is judged for every queued request in every iteration: as if the request ran at
  once and alone, at the measured prefill rate. For a TTLT the application's mean output at the
  measured pace comes on top (nothing, while there is no history).
- *Slack*: a decode with a TTLT has no deadline for its next token. The application's mean output
  gives it a pace. Mean + 2 sigma (section 3.4) is meant for the priority; as a pace it would hold
  chunks down for outputs that hardly ever come.
- *Hints*: where an important request is predicted late in the order of this iteration, less
  important requests before it are relegated, the least important first and among them the largest,
  as far as that rescues it, and not at all if it does not.
- *Selective preemption* costs no KV: a request in prefill may be overtaken, unless one full
  iteration more would make it late.
- A decode whose token is already late keeps its TBT as its slack: it cannot be rescued, but need
  not starve either. If even the decodes alone do not fit its TBT, it gets the pace of
  non-interactive requests. So does a decode whose TTLT asks for a quicker pace than the decodes
  alone have. Otherwise one such request would stop all prefill.
- Algorithm 1 as printed does not end once every waiting request is relegated. Here those that have
  begun follow in turn and run; the others leave the replica.
- *Prediction*: the paper trains a random forest, its artifact fits lines; here it is the replica's
  profile. Live its predictions are raised by its scatter, up to 10 % (shared/perf/online.py), and
  by SAFETY on top.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.policy import chunk
from shared.policy.chunk import Decoding, Rows
from shared.policy.fit import accept_what_fits
from shared.policy.lengths import OutputLengths
from shared.policy.seam import Admission, Bools, Choice, Declared, Floats, Observation, View
from shared.routing.routings import RouterName
from shared.schemas import Offer

# Section 4.1.4: throughput saturates there.
MAX_CHUNK_TOKENS = 2500
# Artifact, prediction_safety_factor: predicted seconds are multiplied by it.
SAFETY = 1.2
# Section 3.6: seconds added to a deadline per token that remains, at low load and under load.
ALPHA_LOW_S = 0.001
ALPHA_HIGH_S = 0.008
# Ours: the load (see above) up to which alpha is low, and from which it is high; linear between.
LOW_LOAD = 0.25
HIGH_LOAD = 0.75
# Artifact, tbt_s_non_interactive_decode.
BATCH_TBT_S = 0.4
# Artifact, prefill_throughput_ema_decay, per iteration. Iterations below its smallest chunk do not
# count: they do not show the throughput.
RATE_DECAY = 0.995
RATE_MIN_TOKENS = 128
# Section 4, baselines: the chunk without dynamic chunking, decodes included.
CHUNK_TOKENS = 256

# Waiting requests that are sorted first: an iteration rarely gives more of them a token.
REACH = 64

PINNED, STANDARD, RELEGATED = 0, 1, 2


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The three switches are the rows of Table 5; all off is Sarathi-EDF."""

    dynamic_chunking: bool = True
    eager_relegation: bool = True
    hybrid: bool = True
    chunk_tokens: Annotated[int, Meta(ge=1)] = CHUNK_TOKENS  # only without dynamic chunking
    max_chunk_tokens: Annotated[int, Meta(ge=1)] = MAX_CHUNK_TOKENS
    safety: Annotated[float, Meta(ge=1)] = SAFETY
    alpha_low_s: Annotated[float, Meta(ge=0)] = ALPHA_LOW_S
    alpha_high_s: Annotated[float, Meta(ge=0)] = ALPHA_HIGH_S
    batch_tbt_s: Annotated[float, Meta(gt=0)] = BATCH_TBT_S
    router: RouterName = "attainable"


class Queue:
    """The rows that are still to prefill, and their predictions; arrays parallel to `rows`."""

    def __init__(self, view: View, lengths: OutputLengths, rate: float, step_s: float) -> None:
        rows = (~view.in_decode).nonzero()[0]
        self.rows: Rows = rows
        self.left: Floats = (view.target_tokens[rows] - view.computed_tokens[rows]).astype(
            np.float64
        )
        self.seconds: Floats = self.left / rate
        self.next_due: Floats = view.next_due_unix_s[rows]
        self.last_due: Floats = view.last_due_unix_s[rows]
        self.decode_left: Floats = np.zeros(len(rows))
        self.due: Floats = self.next_due  # when prefill must have ended
        if np.count_nonzero(np.isfinite(self.last_due)):
            app, most = view.application[rows], view.max_tokens[rows]
            made = view.generated_tokens[rows]
            self.decode_left = np.maximum(
                np.minimum(lengths.upper(view.applications)[app], most) - made, 1.0
            )
            expected = np.maximum(
                np.minimum(lengths.mean(view.applications)[app], most) - made, 0.0
            )
            self.due = np.minimum(self.next_due, self.last_due - expected * step_s)
        self.standard: Bools = view.standard[rows]
        self.begun: Bools = view.phase[rows] == chunk.PREFILL
        self.importance: Floats = view.importance[rows]
        self.slot = view.slot[rows]

    def key(self, alpha_s: float) -> Floats:
        """The priority of each row: Eq. 4 and 5, the smaller where a request has both kinds of
        deadline. A token already owed counts as the first.
        """
        interactive = self.next_due + alpha_s * self.left
        whole: Floats = np.minimum(
            interactive, self.last_due + alpha_s * (self.left + self.decode_left)
        )
        return whole

    def load(self, now_unix_s: float, waiting: Bools) -> float:
        """0 without a queue; 1 when deadline order can only just serve every request in time."""
        due = self.due[waiting]
        order = due.argsort(kind="stable")
        ahead_s = self.seconds[waiting][order].cumsum()
        return float((ahead_s / np.maximum(due[order] - now_unix_s, 1e-6)).max(initial=0.0))


class QoServe:
    """The policy. It learns output lengths per application, the prefill rate and the pace of
    iterations; the view holds all else.
    """

    name = "qoserve"
    declared = Declared()

    def __init__(self, settings: Settings) -> None:
        self._set = settings
        self._lengths = OutputLengths()
        self._rate_tokens = 0.0  # decaying sums over iterations with prefill
        self._rate_s = 0.0
        self._step_s = 0.0  # decaying mean over iterations with decodes

    def admit(self, view: View, offers: Sequence[Offer]) -> Sequence[Admission]:
        return accept_what_fits(view, offers)

    def plan(self, view: View) -> Sequence[Choice]:
        decodes = chunk.decoding(view)
        if self._set.dynamic_chunking:
            limit_tokens = self._set.max_chunk_tokens
            budget_s = self.slack_s(view, decodes) / self._set.safety
        else:
            limit_tokens, budget_s = self._set.chunk_tokens - len(decodes.rows), math.inf
        queue = Queue(view, self._lengths, self._rate(view.profile), self._step_s)
        if len(queue.rows) == 0:
            return [chunk.fill(view, decodes, queue.rows, limit_tokens=0)]
        now = view.start_unix_s
        one_more_s = min(budget_s, self._set.max_chunk_tokens / self._rate(view.profile))
        late = np.zeros(len(queue.rows), dtype=np.bool_)
        if self._set.eager_relegation:
            late = queue.standard & (now + queue.seconds > queue.due)
        waiting = queue.standard & ~late
        key = queue.key(self._alpha_now_s(queue, now, waiting))
        pinned = queue.begun & (now + one_more_s + queue.seconds > queue.due)
        if self._set.eager_relegation and queue.importance.min() < queue.importance.max():
            given_up = _give_up(
                queue, _order(queue, key, waiting, pinned)[: np.count_nonzero(waiting)], now
            )
            late[given_up] = True
            waiting[given_up] = False
        order = _order(queue, key, waiting, pinned, limit_tokens)
        stays = ~late | queue.begun  # one relegated before it began leaves the replica
        return [
            chunk.fill(
                view,
                decodes,
                queue.rows[order[stays[order]]],
                limit_tokens=limit_tokens,
                budget_s=budget_s,
                relegate=queue.rows[late],
            )
        ]

    def slack_s(self, view: View, decodes: Decoding) -> float:
        """The longest the iteration may take for the sake of its standard decodes; inf without any
        (section 3.3).

        Interactive: the time until the owed token is due. Non-interactive: the time left divided by
        the tokens expected to be left, at most `batch_tbt_s`, and exactly `batch_tbt_s` where no
        iteration is so short. Best-effort decodes ask for nothing.
        """
        rows = decodes.rows[view.standard[decodes.rows]]
        if len(rows) == 0:
            return math.inf
        pace_s = self._set.batch_tbt_s
        tbt_s = view.tbt_s[rows]
        slack = view.next_due_unix_s[rows] - view.start_unix_s
        lost = slack < 0
        due = view.last_due_unix_s[rows]
        whole = np.isfinite(due)
        some_lost, some_whole = np.count_nonzero(lost), np.count_nonzero(whole)
        if some_lost or some_whole:
            # the shortest iteration with these decodes
            least_s = self._set.safety * view.profile.batch_s(decodes.shape)
        if some_lost:
            slack = np.where(lost, np.where(tbt_s >= least_s, tbt_s, pace_s), slack)
        smallest = float(slack.min())
        if some_whole:
            rows, left_s = rows[whole], due[whole] - view.start_unix_s
            tokens = np.minimum(
                self._lengths.mean(view.applications)[view.application[rows]], view.max_tokens[rows]
            )
            share = left_s / np.maximum(tokens - view.generated_tokens[rows], 1.0)
            smallest = min(smallest, float(np.where(share < least_s, pace_s, share).min()), pace_s)
        elif np.count_nonzero(np.isfinite(tbt_s)) < len(tbt_s):
            smallest = min(smallest, pace_s)
        return smallest

    def _alpha_now_s(self, queue: Queue, now_unix_s: float, waiting: Bools) -> float:
        if not self._set.hybrid:
            return 0.0
        if self._set.alpha_low_s == self._set.alpha_high_s:
            return self._set.alpha_high_s  # whatever the load
        return self.alpha_s(queue.load(now_unix_s, waiting))

    def alpha_s(self, load: float) -> float:
        """Seconds per token of remaining work, for a load as `Queue.load` gives it."""
        share = min(1.0, max(0.0, (load - LOW_LOAD) / (HIGH_LOAD - LOW_LOAD)))
        return self._set.alpha_low_s + share * (self._set.alpha_high_s - self._set.alpha_low_s)

    def observe(self, seen: Observation) -> None:
        decay = RATE_DECAY**seen.iterations
        if seen.shape.prefill_tokens >= RATE_MIN_TOKENS:
            weight = (1 - decay) / (1 - RATE_DECAY)
            self._rate_tokens = decay * self._rate_tokens + weight * seen.shape.prefill_tokens
            self._rate_s = decay * self._rate_s + weight * seen.exec_s
        if seen.shape.decodes:
            self._step_s = (
                decay * self._step_s + (1 - decay) * seen.exec_s if self._step_s else seen.exec_s
            )
        for ended in seen.ended:
            self._lengths.observe(ended)

    def _rate(self, profile: Profile) -> float:
        """Prefill tokens per second, as measured; until then, that of the largest chunk by the
        profile (the artifact's 8,500).
        """
        if self._rate_s > 0:
            return self._rate_tokens / self._rate_s
        largest = self._set.max_chunk_tokens
        return largest / profile.batch_s(BatchShape().with_chunk(largest, 0))


def _order(
    queue: Queue, key: Floats, waiting: Bools, pinned: Bools, limit_tokens: int | None = None
) -> Rows:
    """The order of the queue: requests that are not relegated first, by key (Algorithm 1,
    COMPARATOR); then the relegated, the important first.

    With `limit_tokens`, only the part of a long queue that an iteration of so many tokens can
    reach.
    """
    near = None if limit_tokens is None else _within_reach(queue, key, waiting, limit_tokens)
    rank = np.where(waiting, np.where(pinned, PINNED, STANDARD), RELEGATED)
    hint = np.where(waiting, 0.0, -queue.importance)
    columns = (queue.slot, key, hint, rank)
    if near is None:
        return np.lexsort(columns)
    return near[np.lexsort([column[near] for column in columns])]


def _within_reach(queue: Queue, key: Floats, waiting: Bools, limit_tokens: int) -> Rows | None:
    """The rows that have begun, and the first of the others, as many as fill an iteration. No row
    behind them gets a token, since a prefill that has not begun is passed over only if none behind
    it begins either (shared/policy/chunk.py). None: the whole queue.
    """
    rows = (waiting & ~queue.begun).nonzero()[0]
    if len(rows) <= 2 * REACH:
        return None
    rows = rows[key[rows].argpartition(REACH)[:REACH]]
    if queue.left[rows].sum() < limit_tokens:
        return None
    return np.concatenate((queue.begun.nonzero()[0], rows))


def _give_up(queue: Queue, order: Rows, now_unix_s: float) -> Rows:
    """The less important standard requests that must go for more important ones behind them.
    `order` holds the standard requests.
    """
    importance = queue.importance[order]
    if len(order) < 2:
        return order[:0]
    seconds, spare = queue.seconds[order], queue.due[order] - now_unix_s
    gone = np.zeros(len(order), dtype=np.bool_)
    passed = np.zeros(len(order), dtype=np.bool_)  # rescued already, or beyond rescue
    while True:
        ahead_s = np.cumsum(np.where(gone, 0.0, seconds))
        lowest_ahead = np.minimum.accumulate(np.where(gone, np.inf, importance))
        needy = (ahead_s > spare) & (lowest_ahead < importance) & ~gone & ~passed
        if not needy.any():
            return order[gone]
        i = int(needy.argmax())
        passed[i] = True
        short_s = ahead_s[i] - spare[i]
        lesser = np.flatnonzero(~gone[:i] & (importance[:i] < importance[i]))
        lesser = lesser[np.lexsort((lesser, -seconds[lesser], importance[lesser]))]
        freed_s = np.cumsum(seconds[lesser])
        enough = int(np.searchsorted(freed_s, short_s))
        if enough < len(lesser):
            gone[lesser[: enough + 1]] = True
