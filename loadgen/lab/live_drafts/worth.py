"""The time of iterations by phase, and what drafts are worth by the number of decodes."""

from collections.abc import Sequence
from statistics import fmean

from msgspec import Struct

from loadgen.lab.live_drafts.followed import Iteration

# Decodes in an iteration, from and to.
BANDS = ((1, 2), (3, 5), (6, 10), (11, 20), (21, 40), (41, 1 << 30))


class Phases(Struct, frozen=True, kw_only=True):
    """The mean iteration with decodes: with drafts to verify, or without any."""

    iterations: int = 0
    decodes: float = 0.0
    draft_s: float = 0.0
    pass_s: float = 0.0  # the target's: with drafts, the verification
    rest_s: float = 0.0
    tokens: float = 0.0  # of a decode


class Band(Struct, frozen=True, kw_only=True):
    """Iterations of decodes alone, so many at once."""

    least: int
    most: int
    plain: Phases
    drafting: Phases

    @property
    def name(self) -> str:
        return f"{self.least}-{self.most}" if self.most < 1 << 30 else f"{self.least} and more"

    @property
    def drafts_fraction(self) -> float | None:
        """The share of the iterations that verify drafts."""
        every = self.plain.iterations + self.drafting.iterations
        return self.drafting.iterations / every if every else None


def phases(iterations: Sequence[Iteration]) -> Phases:
    if not iterations:
        return Phases()
    decodes = sum(one.shape.decodes for one in iterations)
    firsts = sum(one.shape.decodes + one.accepted for one in iterations)
    return Phases(
        iterations=len(iterations),
        decodes=decodes / len(iterations),
        draft_s=fmean(one.draft_s for one in iterations),
        pass_s=fmean(one.pass_s for one in iterations),
        rest_s=fmean(one.rest_s for one in iterations),
        tokens=firsts / decodes,
    )


def bands(iterations: Sequence[Iteration]) -> list[Band]:
    found = []
    for least, most in BANDS:
        inside = [
            one for one in iterations if one.of_decodes and least <= one.shape.decodes <= most
        ]
        found.append(
            Band(
                least=least,
                most=most,
                plain=phases([one for one in inside if not one.drafted]),
                drafting=phases([one for one in inside if one.drafted]),
            )
        )
    return found


def gain(drafting: Phases, plain: Phases) -> float | None:
    """Tokens a second of a decode with drafts, over those without. Waits and hand-overs count on
    neither side: they are the fleet's.
    """
    if not drafting.iterations or not plain.iterations:
        return None
    per_s = drafting.tokens / (drafting.draft_s + drafting.pass_s)
    return per_s * (plain.draft_s + plain.pass_s)
