"""Configuration of one process: defaults, then the TOML file named by SLACKLINE_CONFIG, then the environment.

Each service has one frozen struct and one section. A key of its section is set in the file under `[<section>]` or by
SLACKLINE_<SECTION>_<FIELD>. What all services share (FLEET_KEYS) stands at the top of the file or in SLACKLINE_<KEY>, and a
section may say otherwise. Anything unknown or of the wrong type stops the start: a setting that is silently ignored is worse.
"""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from shared.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)

SECTIONS = ("admission", "planner", "relegation", "worker", "gateway")
FLEET_KEYS = ("url", "policy", "settings", "tiers")
PREFIX = "SLACKLINE_"
USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")


def load(kind: type[T], section: str, environ: Mapping[str, str] | None = None) -> T:
    """The configuration of one service.

    Environment values are read as their field's type; lists, tables and structs are written as JSON.
    Raises: ConfigError for an unknown key, a value that does not fit, or a required one that is missing.
    """
    env = os.environ if environ is None else environ
    types = {f.name: f.type for f in msgspec.structs.fields(kind)}
    values: dict[str, Any] = {}
    for name, origin, raw in _from_file(env, section, types):
        values[name] = _converted(raw, types[name], origin)
    for name, origin, text in _from_environment(env, section, types):
        values[name] = _from_text(text, types[name], origin)
    missing = [f.name for f in msgspec.structs.fields(kind) if f.required and f.name not in values]
    if missing:
        raise ConfigError(f"{section}.{missing[0]} is required: set it under [{section}] or in {_variable(section, missing[0])}")
    try:
        return kind(**values)
    except ValueError as error:  # a struct's own check over several fields
        raise ConfigError(f"[{section}]: {error}") from error


def without_secrets(config: msgspec.Struct) -> dict[str, Any]:
    """The configuration as plain values for the log, with user and password taken out of every URL."""
    plain: dict[str, Any] = msgspec.to_builtins(config, str_keys=True)
    return {name: USER_INFO.sub("***@", value) if isinstance(value, str) else value for name, value in plain.items()}


def _from_file(env: Mapping[str, str], section: str, types: Mapping[str, Any]) -> Iterable[tuple[str, str, Any]]:
    path = env.get(f"{PREFIX}CONFIG")
    if not path:
        return
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"SLACKLINE_CONFIG={path} cannot be read: {error}") from error
    for key in tables:
        _check_known(key, (*SECTIONS, *FLEET_KEYS), f"at the top of {path}")
    for key in FLEET_KEYS:
        if key in tables and key in types:
            yield key, f"{key} at the top of {path}", tables[key]
    table = tables.get(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{section} in {path} must be a section, [{section}]")
    for key, raw in table.items():
        _check_known(key, types, f"in [{section}] of {path}")
        yield key, f"{section}.{key} in {path}", raw


def _from_environment(env: Mapping[str, str], section: str, types: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    for key in FLEET_KEYS:
        variable = PREFIX + key.upper()
        if variable in env and key in types:
            yield key, variable, env[variable]
    own = f"{PREFIX}{section.upper()}_"
    for variable in sorted(v for v in env if v.startswith(own)):
        key = variable.removeprefix(own).lower()
        _check_known(key, types, f"in the environment ({variable})")
        yield key, variable, env[variable]


def _check_known(key: str, known: Iterable[str], where: str) -> None:
    if key not in known:
        raise ConfigError(f"unknown key {key!r} {where}; there are: {', '.join(sorted(known))}")


def _from_text(text: str, kind: Any, origin: str) -> Any:
    try:
        return msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError as plain:
        if not text.lstrip().startswith(("{", "[")):
            raise ConfigError(f"{origin}={text!r}: {plain}") from plain
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{origin}={text!r}: {error}") from error


def _converted(raw: Any, kind: Any, origin: str) -> Any:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {error}") from error


def _variable(section: str, name: str) -> str:
    return f"{PREFIX}{section.upper()}_{name.upper()}"
