"""Makes a profile from a file of measured iterations: reads them, fits a form, and states the error
on a fifth of them that the fit did not see.
"""

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

import numpy as np

from shared.errors import ConfigError
from shared.perf.fitting import LEAST, Timed, coefficients, error_of, least_relative_error
from shared.perf.forms import SlosServeRoofline, SolaPolynomial
from shared.perf.profile_file import FitError, Form
from shared.perf.shape import BatchShape

SECONDS = "seconds"
DRAFTS = "drafts"  # may be absent: there are none then
COLUMNS = (*(name for name in BatchShape._fields if name != DRAFTS), SECONDS)
WHOLE = frozenset(
    ("prefill_tokens", "prefills", "prefill_has", "decodes", "decode_context", DRAFTS)
)
# of the iterations, drawn with a fixed seed: measurements are made in rounds, and every fifth could
# be of one kind
HELD_OUT = 0.2
# between the roofline's two lines, as quantiles of the tokens of a batch
SPLITS = np.linspace(0.05, 0.95, 19)


def read_timings(path: Path) -> list[Timed]:
    """The iterations in a CSV with the columns COLUMNS, and DRAFTS if there are any; others are
    ignored. Raises ConfigError that names line and column.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            timings = list(_rows(path, csv.DictReader(file)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"timings {path}: cannot be read: {error}") from error
    if len(timings) < LEAST:
        raise ConfigError(
            f"timings {path}: {len(timings)} iterations are too few to fit a profile: "
            f"it takes {LEAST}"
        )
    return timings


def _rows(path: Path, reader: "csv.DictReader[str]") -> Iterator[Timed]:
    header = reader.fieldnames or ()
    absent = [name for name in COLUMNS if name not in header]
    if absent:
        raise ConfigError(
            f"timings {path}, line 1: no column {', '.join(absent)}; "
            f"the header must have {', '.join(COLUMNS)}"
        )
    for cells in reader:
        here = f"timings {path}, line {reader.line_num}"
        values = {name: _value(here, name, cells[name]) for name in COLUMNS}
        seconds = values.pop(SECONDS)
        tokens, prefills, square, cross, has, decodes, context = values.values()
        shape = BatchShape(
            int(tokens), int(prefills), square, cross, int(has), int(decodes), int(context)
        )
        if DRAFTS in header:
            shape = shape._replace(drafts=int(_value(here, DRAFTS, cells[DRAFTS])))
        if shape.drafts > (shape.prefill_tokens if shape.decodes else 0):
            raise ConfigError(
                f"{here}, column {DRAFTS}: decodes verify them, and they are among prefill_tokens"
            )
        if shape.tokens == 0 or seconds == 0:
            raise ConfigError(f"{here}: an iteration must have tokens and take time")
        yield Timed(shape, seconds)


def _value(here: str, column: str, cell: str | None) -> float:
    try:
        value = float(cell or "")
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf or (column in WHOLE and value != int(value)):
        kind = "whole number" if column in WHOLE else "number"
        raise ConfigError(f"{here}, column {column}: `{cell or ''}` is not a {kind}, 0 or more")
    return value


def fit_form(form: str, timings: Sequence[Timed], source: str) -> tuple[Form, FitError]:
    """The form fitted to all timings; and the error on one fifth of them of a fit to the other
    four. Raises ConfigError for an unknown form.
    """
    if form not in FITTED:
        raise ConfigError(f"form `{form}` is not fitted here; there are {', '.join(FITTED)}")
    fit = FITTED[form]
    drawn = set(Random(0).sample(range(len(timings)), round(HELD_OUT * len(timings))))
    held_out = [timings[n] for n in sorted(drawn)]
    seen = [timed for n, timed in enumerate(timings) if n not in drawn]
    against = (
        f"{len(held_out)} of {len(timings)} iterations of {source}, held out; "
        f"the coefficients are of all"
    )
    return fit(timings), error_of(fit(seen).profile("held-out", 0.0), held_out, against)


def sola_polynomial(timings: Sequence[Timed]) -> SolaPolynomial:
    """Source: [sola] Eq. 3, 4; deviation: coefficients >= 0, relative errors minimised."""
    rows = np.array([timed.shape for timed in timings], dtype=np.float64)
    tokens, prefills, square, cross, decodes, context = (rows[:, n] for n in (0, 1, 2, 3, 5, 6))
    design = np.column_stack([cross, square, tokens, prefills > 0, decodes, context, decodes > 0])
    a0, b0, c0, d0, a1, b1, c1 = least_relative_error(
        design, np.array([timed.exec_s for timed in timings])
    ).tolist()
    return SolaPolynomial(a0=a0, b0=b0, c0=c0, d0=d0, a1=a1, b1=b1, c1=c1)


def slos_serve_roofline(timings: Sequence[Timed]) -> SlosServeRoofline:
    """Two lines over tokens, one fitted to the batches up to some size and one to the larger ones.
    The split with the least error is kept.
    """
    tokens = np.array([timed.shape.tokens for timed in timings], dtype=np.float64)
    exec_s = np.array([timed.exec_s for timed in timings])
    design = np.column_stack([tokens, np.ones(len(tokens))])
    tried = []
    for split in np.unique(np.quantile(tokens, SPLITS)):
        few = tokens <= split
        sides = (few, ~few) if few.any() and not few.all() else (few | True,) * 2
        lines = [least_relative_error(design[side], exec_s[side]) for side in sides]
        off = np.abs(np.maximum(design @ lines[0], design @ lines[1]) / exec_s - 1).mean()
        tried.append((float(off), [line.tolist() for line in lines]))
    (k1a, b_a), (k1b, b_b) = min(tried)[1]
    return SlosServeRoofline(k1a=k1a, b_a=b_a, k1b=k1b, b_b=b_b)


FITTED: Mapping[str, Callable[[Sequence[Timed]], Form]] = {
    "piecewise_tokens_plus_attention": coefficients,
    "sola_polynomial": sola_polynomial,
    "slos_serve_roofline": slos_serve_roofline,
}
