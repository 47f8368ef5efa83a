"""Writes the results of commands to files. A fault becomes a ConfigError of one line."""

from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ConfigError


def make_folder(option: str, folder: Path | None) -> None:
    """Makes a folder of results before the runs begin. Raises ConfigError."""
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option}: cannot make the folder {folder}: {error.strerror}") from error


def write(path: Path, contents: bytes, option: str = "--out") -> None:
    """Raises ConfigError if the file cannot be written."""
    try:
        path.write_bytes(contents)
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path}: {error.strerror}") from error


def json_of(found: Any) -> bytes:
    """JSON for people: a line for each field."""
    return msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"
