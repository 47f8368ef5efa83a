"""Reads traces of one JSON object a line, as Mooncake publishes them and as Dynamo and AIPerf write
those of agents: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`. The lines of one
`session_id` are rounds, each with its whole prompt: one that has no `timestamp` is sent `delay` (or
`delay_ms`) and `tool_wait_ms` after the round before has ended.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from loadgen.load.rows.row import Read, TraceRow
from shared.errors import UNDECODABLE, ConfigError

Milliseconds = Annotated[float, Meta(ge=0)]
Tokens = Annotated[int, Meta(ge=0)]


class Line(Struct, frozen=True):
    input_length: Tokens
    output_length: Tokens
    timestamp: Milliseconds | None = None
    hash_ids: tuple[int, ...] = ()
    session_id: str = ""
    delay: Milliseconds | None = None
    delay_ms: Milliseconds | None = None
    tool_wait_ms: Milliseconds = 0.0


_decode = msgspec.json.Decoder(Line).decode


def read_lines(file: str, lines: Iterable[str]) -> Iterator[Read]:
    """The requests of these lines, each session as its first with those that follow it. Raises
    ConfigError that names the line.
    """
    sessions: dict[str, list[Read]] = {}
    order: list[list[Read]] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = _decode(text)
        except UNDECODABLE as error:
            raise ConfigError(f"trace {file}, line {number}: {error}") from error
        pause_ms = line.delay if line.delay is not None else line.delay_ms
        read = Read(
            number,
            TraceRow(
                None if line.timestamp is None else line.timestamp / 1000,
                line.input_length,
                line.output_length,
                "session" if line.session_id else "",
                ids=line.hash_ids,
                pause_s=((pause_ms or 0.0) + line.tool_wait_ms) / 1000,
            ),
        )
        before = sessions.get(line.session_id)
        if before is not None and line.timestamp is None:
            before.append(read)
            continue
        order.append([read])
        if line.session_id:
            sessions[line.session_id] = order[-1]
    for (number, first), *later in order:
        yield Read(number, first._replace(then=tuple(row for _, row in later if not row.empty)))
