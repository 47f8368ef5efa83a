"""Reads request traces: our normalised schema (csv or csv.gz) and the CSV that Azure publishes.

Normalised: `arrival_s` (seconds from the start; absent or empty where the source has lengths only),
`prompt_tokens`, `output_tokens`, and where the source has them `app`, `tier` and `model`; other
columns are ignored. Azure: `TIMESTAMP,ContextTokens,GeneratedTokens`. A row with 0 tokens tells of
a failed request, and is left out.
"""

import csv
import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TextIO

from shared.errors import ConfigError

NORMALISED = ("arrival_s", "prompt_tokens", "output_tokens")
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
GZIP_MAGIC = b"\x1f\x8b"
UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error)


class TraceRow(NamedTuple):
    arrival_s: float | None
    prompt_tokens: int
    output_tokens: int
    application: str
    tier: str = ""  # empty: not recorded
    model: str = ""  # likewise


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows in order of arrival, the first at 0 s; in file order where there are no times."""

    name: str
    rows: Sequence[TraceRow]
    failed: int = 0  # rows of requests that had no tokens, which are left out

    @property
    def recorded(self) -> bool:
        """True if the trace has arrival times."""
        return self.rows[0].arrival_s is not None

    @property
    def span_s(self) -> float:
        return self.rows[-1].arrival_s or 0.0

    def within(self, context_tokens: int) -> "Trace":
        """The trace without rows that the context cannot hold. ConfigError: no row is left."""
        rows = [row for row in self.rows if row.prompt_tokens + row.output_tokens <= context_tokens]
        if not rows:
            raise ConfigError(
                f"trace {self.name}: no request fits a context of {context_tokens} tokens"
            )
        return Trace(self.name, rows, self.failed)

    def of_model(self, model: str) -> "Trace":
        """The requests to this model, the first at 0 s. ConfigError: there are none."""
        rows = [row for row in self.rows if row.model == model]
        if not rows:
            known = ", ".join(sorted({row.model for row in self.rows} - {""})) or "none"
            raise ConfigError(
                f"trace {self.name}: no request to the model `{model}`; it has {known}"
            )
        if self.recorded:
            begin_s = rows[0].arrival_s or 0.0
            rows = [row._replace(arrival_s=(row.arrival_s or 0.0) - begin_s) for row in rows]
        return Trace(f"{self.name}, {model}", rows, self.failed)


def read_trace(path: Path) -> Trace:
    """The trace in this file. Raises ConfigError that names file, line and column."""
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == GZIP_MAGIC
        opener = gzip.open if zipped else open
        with opener(path, "rt", newline="", encoding="utf-8-sig") as file:
            found = list(_rows(path, file))
    except UNREADABLE as error:
        raise ConfigError(f"trace {path}: cannot be read: {error}") from error
    rows = [row for row in found if row.prompt_tokens and row.output_tokens]
    if not rows:
        raise ConfigError(f"trace {path}: holds no requests")
    if len({row.arrival_s is None for row in rows}) == 2:
        raise ConfigError(
            f"trace {path}: column arrival_s is filled in some rows and empty in others"
        )
    if rows[0].arrival_s is not None:
        rows.sort(key=lambda row: row.arrival_s or 0.0)
        first_s = rows[0].arrival_s or 0.0
        rows = [row._replace(arrival_s=(row.arrival_s or 0.0) - first_s) for row in rows]
    name = path.name.removesuffix(".gz").removesuffix(".csv")
    return Trace(name, rows, len(found) - len(rows))


def _rows(path: Path, file: TextIO) -> Iterator[TraceRow]:
    reader = csv.reader(file)
    header = [name.strip() for name in next(reader, [])]
    azure = set(AZURE) <= set(header)
    names = AZURE if azure else NORMALISED
    absent = [name for name in names[1:] if name not in header]
    if absent:
        raise ConfigError(
            f"trace {path}, line 1: no column {', '.join(absent)}; the header must have "
            f"{', '.join(NORMALISED)} (the first only if there are times) or, as Azure's, "
            f"{', '.join(AZURE)}"
        )
    prompt, output = (header.index(name) for name in names[1:])
    at, app, tier, model = (
        header.index(name) if name in header else None
        for name in (names[0], "app", "tier", "model")
    )
    arrived_s = _Instants() if azure else _seconds
    for cells in reader:
        if not cells:
            continue
        if len(cells) < len(header):
            raise ConfigError(
                f"trace {path}, line {reader.line_num}: {len(cells)} columns where the header has "
                f"{len(header)}"
            )
        here = f"trace {path}, line {reader.line_num}"
        yield TraceRow(
            None if at is None else arrived_s(here, cells[at]),
            _count(here, names[1], cells[prompt]),
            _count(here, names[2], cells[output]),
            cells[app] if app is not None else "azure" if azure else "",
            cells[tier].strip() if tier is not None else "",
            cells[model].strip() if model is not None else "",
        )


class _Instants:
    """Reads the instants of one file. Some copies name an offset from UTC in each row, which may
    change with summer time, and some in none.
    """

    def __init__(self) -> None:
        self._offsets: bool | None = None

    def __call__(self, here: str, cell: str) -> float:
        try:
            instant = datetime.fromisoformat(cell.strip())
        except ValueError as error:
            raise ConfigError(
                f"{here}, column TIMESTAMP: `{cell}` is not a time such as 2023-11-16 18:17:03.979"
            ) from error
        offsets = instant.tzinfo is not None
        if self._offsets not in (None, offsets):
            raise ConfigError(
                f"{here}, column TIMESTAMP: `{cell}`: name an offset from UTC in every row, or in"
                " none"
            )
        self._offsets = offsets
        return (instant if offsets else instant.replace(tzinfo=UTC)).timestamp()


def _seconds(here: str, cell: str) -> float | None:
    if not cell.strip():
        return None
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(
            f"{here}, column arrival_s: `{cell}` is not a number of seconds, 0 or more"
        )
    return value


def _count(here: str, column: str, cell: str) -> int:
    try:
        value = int(cell)
    except ValueError:
        value = -1
    if value < 0:
        raise ConfigError(
            f"{here}, column {column}: `{cell}` is not a whole number of tokens, 0 or more"
        )
    return value
