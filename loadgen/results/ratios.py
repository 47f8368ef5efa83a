"""Claims that one policy carries more than another, as ratios within one run."""

from collections.abc import Sequence
from math import prod

from loadgen.results.section import Cells, compare


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """None while one is not known."""
    return None if ours is None or not theirs else ours / theirs


def ahead(published: float, ours: float | None) -> Cells:
    """As `compare`; but whoever is published to be ahead must be so here, however near the figures
    are.
    """
    cells = compare(published, None if ours is None else round(ours, 3))
    return cells._replace(verdict="no: not ahead") if ours is not None and ours <= 1 else cells


def mean(ratios: Sequence[float | None]) -> float | None:
    """Geometric; None while one is not known."""
    known = [one for one in ratios if one is not None]
    return prod(known) ** (1 / len(known)) if len(known) == len(ratios) else None


def best(rates: Sequence[float | None]) -> float | None:
    """None while one is not known."""
    known = [rate for rate in rates if rate is not None]
    return max(known) if len(known) == len(rates) else None
