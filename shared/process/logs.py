"""Logs: one JSON object a line on stdout, with events named `noun.verb` and facts as fields with
units in their names.

Cores never log; their shells do. A filtered call costs one attribute lookup and an empty function.
"""

import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any

import msgspec
import structlog

from shared.errors import ConfigError

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

Fields = MutableMapping[str, Any]


def configure(service: str, instance: str, environ: Mapping[str, str] | None = None) -> None:
    """Set up the logs of this process; every line names `service` and `instance`.

    Raises: ConfigError unless SLACKLINE_LOG_LEVEL is debug, info, warning or error.
    """
    env = os.environ if environ is None else environ
    name = env.get("SLACKLINE_LOG_LEVEL", "info").lower()
    if name not in LEVELS:
        raise ConfigError(f"SLACKLINE_LOG_LEVEL={name!r}: use one of {', '.join(LEVELS)}")
    level = LEVELS[name]

    def identify(_logger: Any, _method: str, fields: Fields) -> Fields:
        return {
            "at": datetime.now(UTC).isoformat(timespec="microseconds"),
            "service": service,
            "instance": instance,
            **fields,
        }

    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            identify,
            structlog.processors.JSONRenderer(serializer=_encoded),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.BytesLoggerFactory(sys.stdout.buffer),
        cache_logger_on_first_use=True,
    )
    # Libraries log through the standard module; their warnings and errors go the same way.
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[_LibraryLogs()], force=True)


def logger() -> structlog.typing.FilteringBoundLogger:
    """A logger for a module's top level. Its configuration is the one in force at its first use."""
    log: structlog.typing.FilteringBoundLogger = structlog.get_logger()
    return log


def _encoded(fields: Fields, **_: Any) -> bytes:
    return msgspec.json.encode(fields, enc_hook=repr)


class _LibraryLogs(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        logger().log(
            record.levelno,
            "library.logged",
            logger=record.name,
            message=record.getMessage(),
            exc_info=record.exc_info,
        )
