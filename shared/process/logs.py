"""Logs as JSON objects on stdout, one a line: events named `noun.verb`, facts as fields with units.
Cores never log; their shells do. A filtered call costs an attribute lookup and an empty function.

Logging never raises: a line that cannot be written is dropped, and the next says in `lines_dropped`
how many were. A warning is written LINES_A_MINUTE times at most; the next one says in
`lines_left_out` how many were not.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import structlog

from shared.errors import ConfigError
from shared.telemetry.telemetry import trace_id

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

Fields = MutableMapping[str, Any]
LINES_A_MINUTE = 60  # lines of one event with level warning or error


def configure(service: str, instance: str, environ: Mapping[str, str] | None = None) -> None:
    """Set up the logs of `service` and `instance`. Raises ConfigError for an unknown level."""
    env = os.environ if environ is None else environ
    name = env.get("SLACKLINE_LOG_LEVEL", "info").lower()
    if name not in LEVELS:
        raise ConfigError(f"SLACKLINE_LOG_LEVEL={name!r}: use one of {', '.join(LEVELS)}")
    level = LEVELS[name]

    # None if stdout was closed before the start: its number may belong to a socket by now
    lines = Lines(None if sys.stdout is None else sys.stdout.fileno())

    def identify(_logger: Any, _method: str, fields: Fields) -> Fields:
        dropped = {"lines_dropped": lines.dropped} if lines.dropped else {}
        return {
            "at": datetime.now(UTC).isoformat(timespec="microseconds"),
            "service": service,
            "instance": instance,
            **fields,
            **dropped,
        }

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            Sparing(time.monotonic),
            structlog.processors.format_exc_info,
            identify,
            structlog.processors.JSONRenderer(serializer=_encoded),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=True,
    )
    # Libraries log through the standard module; their warnings and errors go the same way.
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[_LibraryLogs()], force=True)


def logger() -> structlog.typing.FilteringBoundLogger:
    """A logger for a module's top level. Its configuration is the one in force at its first use."""
    log: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return log


def traced(traceparent: str) -> AbstractContextManager[Any]:
    """A context in which every line has the `trace_id`, if there is a trace."""
    found = trace_id(traceparent)
    return structlog.contextvars.bound_contextvars(trace_id=found) if found else nullcontext()


class Sparing:
    """Leaves out warnings and errors of one event beyond LINES_A_MINUTE: peers could cause many."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._minutes: dict[str, _Minute] = {}  # by event

    def __call__(self, _logger: Any, _method: str, fields: Fields) -> Fields:
        if fields["level"] not in ("warning", "error"):
            return fields
        now_s = self._now_s()
        minute = self._minutes.setdefault(str(fields["event"]), _Minute(now_s))
        if now_s - minute.began_s >= 60.0:
            minute.began_s, minute.lines = now_s, 0
        minute.lines += 1
        if minute.lines > LINES_A_MINUTE:
            minute.left_out += 1
            raise structlog.DropEvent
        if minute.left_out:
            fields["lines_left_out"] = minute.left_out
            minute.left_out = 0
        return fields


@dataclass(slots=True)
class _Minute:
    began_s: float
    lines: int = 0  # since then
    left_out: int = 0  # since the last line


class Lines:
    """Whole lines to a file descriptor. A line that cannot be written is dropped, and counted."""

    def __init__(self, descriptor: int | None) -> None:
        self.dropped = 0
        self._descriptor = descriptor
        self._torn = False  # the last write ended within a line

    def msg(self, line: bytes) -> None:
        data = (b"\n" if self._torn else b"") + line + b"\n"
        try:
            if self._descriptor is None:
                raise OSError("stdout is closed")
            while data:
                data = data[os.write(self._descriptor, data) :]
                self._torn = bool(data)
        except OSError:
            self.dropped += 1
        else:
            self.dropped = 0

    debug = info = warning = error = critical = msg


def _encoded(fields: Fields, **_: Any) -> bytes:
    try:
        return msgspec.json.encode(fields, enc_hook=repr)
    except (ValueError, TypeError):  # text that is not UTF-8, a key that is no text
        return json.dumps(fields, default=repr, skipkeys=True).encode()


class _LibraryLogs(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except (TypeError, ValueError):  # a format that its arguments do not fit
            message = f"{record.msg} {record.args}"
        logger().log(
            record.levelno,
            "library.logged",
            logger=record.name,
            message=message,
            exc_info=record.exc_info,
        )
