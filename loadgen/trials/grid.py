"""Searches for the settings of a policy that suit a load: each combination of a grid is tried in
the simulator ([ascendra] sections 7 and 8.7).

The combinations are ranked by capacity, the highest rate that each carries, or by the requests that
each violates at one rate. Every combination serves the same requests.
"""

from collections.abc import Mapping, Sequence
from itertools import product

from msgspec import Struct

from loadgen.trials.figures import Figures
from loadgen.trials.goodput import Probe
from shared.errors import ConfigError
from shared.policy.ascendra import policy as ascendra

Grid = Mapping[str, Sequence[str]]

# replicas: up to so many, every mix of pools is tried; a larger fleet is divided into subgroups
# ([ascendra] section 8.7: to search less)
MIXES_UP_TO = 6


class Carried(Struct, frozen=True, kw_only=True):
    """A configuration judged by capacity. `probes`: the rates tried, in that order; `capacity_rps`
    is 0 where even the lowest failed.
    """

    settings: dict[str, str]
    capacity_rps: float
    probes: list[Probe]


class AtRate(Struct, frozen=True, kw_only=True):
    """A configuration judged by its violations at one rate."""

    settings: dict[str, str]
    figures: Figures


def parse_grid(words: Sequence[str], fixed: Mapping[str, str]) -> dict[str, list[str]]:
    """Parse words of the form `KEY=VALUE,VALUE,...`. Raises ConfigError for any other word, for a
    key or value given twice, and for a key that is fixed.
    """
    grid: dict[str, list[str]] = {}
    for word in words:
        key, equals, text = word.partition("=")
        values = text.split(",")
        if not key or not equals or not all(values):
            raise ConfigError(f"--grid `{word}`: expected KEY=VALUE,VALUE,...")
        if key in grid or key in fixed:
            raise ConfigError(f"--grid `{word}`: {key} is given twice")
        if len(set(values)) < len(values):
            raise ConfigError(f"--grid `{word}`: one of the values is there twice")
        grid[key] = values
    return grid


def own_grid(policy: str, replicas: int, fixed: Mapping[str, str]) -> dict[str, list[str]]:
    """The grid that the paper of a policy searches, without the fixed keys. Raises ConfigError for
    a policy whose paper has none.

    Ascendra: the mix of pools (section 8.7), the offload threshold (section 5.3) and the batch size
    of LP (section 6.2). The paper does not give the values; these are the default, half of it and
    twice it.
    """
    if policy != ascendra.Ascendra.name:
        raise ConfigError(f"policy {policy}: say what to try, with --grid KEY=VALUE,VALUE,...")
    low_high = (
        [f"{replicas - high}L{high}H" for high in range(1, replicas)]
        if replicas <= MIXES_UP_TO
        else list(ascendra.SUBGROUPS)
    )
    whole = {
        "subgroup": low_high,
        "worst_batches": ["0.5", "1", "2"],
        "batch_requests": ["64", "128", "256"],
    }
    return {key: values for key, values in whole.items() if values and key not in fixed}


def combinations(grid: Grid) -> list[dict[str, str]]:
    """Every combination of one value for each key; the last key changes fastest."""
    return [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]


def best_first(found: Sequence[Carried | AtRate]) -> list[Carried | AtRate]:
    """The configurations, most capacity or fewest violations first, else as in the grid."""
    return sorted(
        found,
        key=lambda one: (
            -one.capacity_rps if isinstance(one, Carried) else one.figures.violated_fraction
        ),
    )
