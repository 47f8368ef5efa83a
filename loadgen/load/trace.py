"""Reads request traces: our normalised schema (csv or csv.gz), the CSV that Azure publishes, and
the JSON lines of Mooncake (rows/jsonl.py).

Normalised: `arrival_s` (seconds from the start; absent or empty where the source has lengths only),
`prompt_tokens`, `output_tokens`, and where the source has them `app`, `tier`, `model` and
`prefix_hash_ids` (of the prompt's blocks, space-separated); other columns are ignored. Azure:
`TIMESTAMP,ContextTokens,GeneratedTokens`. A row with 0 tokens tells of a failed request, and is
left out.
"""

import csv
import gzip
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import TextIO

from loadgen.load.rows.jsonl import read_lines
from loadgen.load.rows.row import BLOCKS, Read, TraceRow, block_tokens
from shared.errors import ConfigError

NORMALISED = ("arrival_s", "prompt_tokens", "output_tokens")
AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
GZIP_MAGIC = b"\x1f\x8b"
UNREADABLE = (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error)


@dataclass(frozen=True, slots=True)
class Trace:
    """Rows in order of arrival, the first at 0 s; in file order where there are no times."""

    name: str
    rows: Sequence[TraceRow]
    failed: int = 0  # rows of requests that had no tokens, which are left out
    id_tokens: int = BLOCKS[0]  # of the blocks that rows have ids of

    @property
    def recorded(self) -> bool:
        """True if the trace has arrival times."""
        return self.rows[0].arrival_s is not None

    @property
    def span_s(self) -> float:
        return self.rows[-1].arrival_s or 0.0

    def within(self, context_tokens: int) -> "Trace":
        """The trace without rows that the context cannot hold, nor the rounds that follow one.
        ConfigError: no row is left.
        """

        def fits(row: TraceRow) -> bool:
            return row.prompt_tokens + row.output_tokens <= context_tokens

        rows = [
            row._replace(then=tuple(takewhile(fits, row.then))) if row.then else row
            for row in self.rows
            if fits(row)
        ]
        if not rows:
            raise ConfigError(
                f"trace {self.name}: no request fits a context of {context_tokens} tokens"
            )
        return replace(self, rows=rows)

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
        return replace(self, name=f"{self.name}, {model}", rows=rows)


def read_trace(path: Path) -> Trace:
    """The trace in this file. Raises ConfigError that names file, line and column."""
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == GZIP_MAGIC
        opener = gzip.open if zipped else open
        with opener(path, "rt", newline="", encoding="utf-8-sig") as file:
            lines = file.read(1) == "{"
            file.seek(0)
            found = list(read_lines(str(path), file) if lines else _rows(path, file))
    except UNREADABLE as error:
        raise ConfigError(f"trace {path}: cannot be read: {error}") from error
    rows = [row for _, row in found if not row.empty]
    if not rows:
        raise ConfigError(f"trace {path}: holds no requests")
    if len({row.arrival_s is None for row in rows}) == 2:
        line = next(number for number, row in found if row.arrival_s is None and not row.empty)
        raise ConfigError(
            f"trace {path}, line {line}: a request without a time, where others have one (column "
            "arrival_s; in JSON lines timestamp, or session_id of a line before)"
        )
    if rows[0].arrival_s is not None:
        rows.sort(key=lambda row: row.arrival_s or 0.0)
        first_s = rows[0].arrival_s or 0.0
        rows = [row._replace(arrival_s=(row.arrival_s or 0.0) - first_s) for row in rows]
    name = path.name.removesuffix(".gz").removesuffix(".csv").removesuffix(".jsonl")
    return Trace(name, rows, len(found) - len(rows), block_tokens(str(path), found))


def _rows(path: Path, file: TextIO) -> Iterator[Read]:
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
    at, app, tier, model, ids = (
        header.index(name) if name in header else None
        for name in (names[0], "app", "tier", "model", "prefix_hash_ids")
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
        row = TraceRow(
            None if at is None else arrived_s(here, cells[at]),
            _count(here, names[1], cells[prompt]),
            _count(here, names[2], cells[output]),
            cells[app] if app is not None else "azure" if azure else "",
            cells[tier].strip() if tier is not None else "",
            cells[model].strip() if model is not None else "",
            _ids(here, cells[ids]) if ids is not None else (),
        )
        yield Read(reader.line_num, row)


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


def _ids(here: str, cell: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, cell.split()))
    except ValueError as error:
        raise ConfigError(
            f"{here}, column prefix_hash_ids: whole numbers with spaces between them are expected"
        ) from error


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
