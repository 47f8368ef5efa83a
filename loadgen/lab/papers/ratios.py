"""The ratios behind the claim that one policy has more capacity than another."""

from collections.abc import Sequence
from math import prod

from loadgen.lab.papers.section import Cells, compare


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """Ours over theirs; None while either is unknown."""
    return None if ours is None or not theirs else ours / theirs


def compare_lead(published: float, ours: float | None) -> Cells:
    """The published ratio by which a policy leads, beside ours.

    As `compare`; but a ratio of 1 or less does not count, however near the published one it is.
    """
    cells = compare(published, None if ours is None else round(ours, 3))
    return cells._replace(verdict="no: not ahead") if ours is not None and ours <= 1 else cells


def geometric_mean(ratios: Sequence[float | None]) -> float | None:
    """The geometric mean of the ratios; None while one of them is unknown."""
    known = [ratio for ratio in ratios if ratio is not None]
    return prod(known) ** (1 / len(known)) if len(known) == len(ratios) else None


def highest(rates: Sequence[float | None]) -> float | None:
    """The highest of the rates; None while one of them is unknown."""
    known = [rate for rate in rates if rate is not None]
    return max(known) if len(known) == len(rates) else None
