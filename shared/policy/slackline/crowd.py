"""The crowd: no more decodes than a pass in each tightest pace has time for.

At this edge one request too many costs more than its own SLO: all decodes of the tightest pace are
late, from token to token. So an offer is declined if with it a pass of those that decode, and of
those that are to, would take longer than the tightest of their paces.

- A decode of a looser pace counts as a part of one.
- A request without a pace in its SLO does not count: it may sit out. What a TTLT asks for beside a
  pace does not count either.
- A pace that not even a decode alone could keep constrains nobody.
- Where a pass takes too long already, those alone are declined that have the tightest pace.
- Where a pace needs drafts and they bring more tokens, and the mean judges, the edge is not sharp:
  some requests have more of theirs accepted than others. Then a request counts for the part by
  which it may well keep its pace, and an offer is declined if the others would lose more than it
  would gain, by their importance. Where deadlines or windows judge, one that is late now and then
  is lost, so the edge stays sharp.
- Where deadlines judge, of each token or of the last, the first token may come long before it is
  due, which earns time (due.py). So a pass needs no margin there: a token that comes later than its
  pace asks is late only once that time is spent.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shared.perf.iteration_time import Profile
from shared.perf.shape import BatchShape
from shared.policy.chunk import Rows
from shared.policy.seam import DEFINITIONS, Bools, Floats, View
from shared.policy.slackline.due import EARNING, Due, earns, eased_s
from shared.policy.slackline.forecast import Work
from shared.policy.slackline.token_order import MARGIN_S
from shared.schemas import Offer
from shared.vocabulary import Definition

# Where drafts bring twice the tokens, a request has its own by so much of the time earlier or later
# than in the mean.
UNSURE = 0.05
SHARP = 1e-9
_MEAN = DEFINITIONS.index(Definition.MEAN_TPOT)


class Decodes(NamedTuple):
    """Requests that decode, or are to, in columns."""

    pace_s: Floats  # inf where the SLO names none
    context: Floats  # tokens that it stands on
    value: Floats  # its importance
    runs: Bools  # it decodes already, and gives way to nobody
    sharp: Bools  # not the mean, but each ten tokens or each token are to keep its pace
    earns: Bools  # deadlines judge, of each token or of the last

    def taken(self, which: Bools | slice) -> "Decodes":
        return Decodes._make(column[which] for column in self)

    def beside(self, other: "Decodes") -> "Decodes":
        return Decodes._make(np.concatenate(pair) for pair in zip(self, other, strict=True))


class Pass(NamedTuple):
    """The price of a pass: seconds of its fixed part, of a decode, of a token of context, and of
    the margin after it. With drafts, of so much of it as brings each decode one token.
    """

    fixed_s: float
    decode_s: float
    context_s: float
    margin_s: float
    unsure: float  # a request's tokens come by so much of the time earlier or later

    def each_s(self, decodes: Decodes) -> Floats:
        return self.decode_s + self.context_s * decodes.context


def _lasts_s(each_s: Floats, pace_s: Floats, every_s: float) -> float:
    """Seconds of a pass in every `every_s`, without its fixed part, of decodes with these paces.
    `each_s`: what they cost.
    """
    return float((each_s * np.minimum(every_s / pace_s, 1.0)).sum())


def pass_of(profile: Profile, decodes: int, context: float, speed: float) -> Pass:
    """The price by a pass of so many decodes, with so many tokens of context together. `speed`:
    drafts bring so many times the tokens in the same time.
    """
    one, many = BatchShape(decodes=1), BatchShape(decodes=decodes + 1)
    context = max(1, round(context))
    one_s, many_s = profile.batch_s(one), profile.batch_s(many)
    decode_s = (many_s - one_s) / decodes
    context_s = (profile.batch_s(many._replace(decode_context=context)) - many_s) / context
    fixed_s = one_s - decode_s
    unsure = UNSURE * min(speed - 1.0, 1.0)
    return Pass(fixed_s / speed, decode_s / speed, context_s / speed, MARGIN_S / speed, unsure)


def crowded(present: Decodes, asked: Decodes, profile: Profile, speed: float) -> Bools:
    """[asked] a mask of those that are too many, one after the other. Less important ones that do
    not decode yet are not in their way. `speed`: as in `pass_of`.
    """
    count = len(present.pace_s) + len(asked.pace_s)
    context = float(present.context.sum()) + float(asked.context.sum())
    price = pass_of(profile, count, context, speed)
    found = np.zeros(len(asked.pace_s), dtype=np.bool_)
    for k in range(len(found)):
        one = asked.taken(slice(k, k + 1))
        found[k] = _too_many(present, one, price)
        if not found[k] and k + 1 < len(found):
            present = present.beside(one)
    return found


def _too_many(present: Decodes, one: Decodes, price: Pass) -> bool:
    own_s = float(one.pace_s[0])
    if math.isinf(own_s):
        return False
    ahead = present.runs | (present.value >= one.value)
    others = present if np.count_nonzero(ahead) == len(ahead) else present.taken(ahead)
    each_s, pace_s = price.each_s(others), others.pace_s
    if one.earns[0] and others.earns.all():
        price = price._replace(margin_s=0.0)
    least_s = price.fixed_s + each_s + price.margin_s
    tightest_s = float(pace_s[pace_s >= least_s].min(initial=own_s))
    without_s = price.fixed_s + _lasts_s(each_s, pace_s, tightest_s) + price.margin_s
    with_s = without_s + _lasts_s(price.each_s(one), one.pace_s, tightest_s)
    if price.unsure and not one.sharp[0]:
        kept = one.value * _kept(with_s, one, price)
        lost = others.value * (_kept(without_s, others, price) - _kept(with_s, others, price))
        return own_s <= with_s / (1.0 + price.unsure) or 0.0 < lost.sum() >= kept.sum()
    if with_s <= tightest_s:
        return False
    return without_s <= tightest_s or own_s <= tightest_s


def _kept(token_s: float, decodes: Decodes, price: Pass) -> Floats:
    """[decodes] the part by which each may well keep its pace, if a token takes so long in the
    mean.
    """
    unsure = np.where(decodes.sharp, SHARP, price.unsure)
    parts: Floats = (1.0 + unsure - token_s / decodes.pace_s) / (2 * unsure)
    return np.clip(parts, 0.0, 1.0)


def present_of(view: View, due: Due, rows: Rows, waiting: Rows, work: Work) -> Decodes:
    """The decodes in these rows, and beside them the `waiting` prefills, whose work is `work`."""
    both = np.concatenate((rows, waiting))
    pace_s, definition = due.pace_s[both], view.definition[both]
    earning = earns(definition)
    tightest_s = view.tightest_tbt_s[both]
    own_s = np.where(view.has_ttlt[both] | np.isinf(tightest_s), tightest_s, pace_s)
    begun, early_s = own_s[: len(rows)], work.due_s - work.seconds.sum()
    to_begin = _eased_s(own_s[len(rows) :], early_s, work.output_tokens, earning[len(rows) :])
    to_come = view.target_tokens[waiting] + work.output_tokens / 2
    return Decodes(
        np.concatenate((begun, to_begin)),
        np.concatenate((view.top_tokens[rows], to_come)),
        view.importance[both],
        np.arange(len(both)) < len(rows),
        definition != _MEAN,
        earning,
    )


def asked_of(offers: Sequence[Offer], work: Work, ahead_s: float) -> Decodes:
    """The requests of these offers, whose work is `work`, behind prefills of `ahead_s`."""
    tokens = np.array([offer.prompt_tokens + offer.generated_tokens for offer in offers])
    tightest_s = np.array([offer.slo.tightest_pace_s(offer.thinking) for offer in offers])
    has_ttlt = np.array([offer.slo.ttlt_s is not None for offer in offers])
    own_s = np.where(has_ttlt | np.isinf(tightest_s), tightest_s, work.pace_s)
    earning = np.array([offer.slo.definition in EARNING for offer in offers])
    sharp = np.array([offer.slo.definition is not Definition.MEAN_TPOT for offer in offers])
    early_s = work.due_s - ahead_s - work.seconds
    return Decodes(
        _eased_s(own_s, early_s, work.output_tokens, earning),
        tokens + work.output_tokens / 2,
        work.value,
        np.zeros(len(offers), dtype=np.bool_),
        sharp,
        earning,
    )


def _eased_s(pace_s: Floats, early_s: Floats, output_tokens: Floats, earning: Bools) -> Floats:
    """The paces, looser by the part of the time that tokens to come have earned. `early_s`: the
    next one may come so early. `earning`: deadlines judge.
    """
    return eased_s(pace_s, np.where(earning & np.isfinite(early_s), early_s, 0.0), output_tokens)
