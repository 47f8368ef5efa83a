"""Reads files that people write. Any fault in such a file becomes a ConfigError of one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import ConfigError


def text_of(path: str | Path) -> str:
    """The text of a file, without the byte-order mark that some editors begin one with."""
    return Path(path).read_text(encoding="utf-8-sig")


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns whatever a reader raises into a ConfigError that begins with `what`."""
    try:
        yield
    except RecursionError as error:
        raise ConfigError(f"{what}: it is nested too deeply") from error
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise ConfigError(f"{what}: {error}") from error
