"""Configuration of a process: defaults, the TOML file named by SLACKLINE_CONFIG, the environment.

Each service has one frozen struct and one section, `[<section>]` or SLACKLINE_<SECTION>_<FIELD>.
Keys that all services share (FLEET_KEYS) stand at the top or in SLACKLINE_<KEY>; a section may
override them. Every section but the gateway's has Watched's fields. An unknown key or a wrong type
stops the start: to ignore it silently would be worse.
"""

import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta

from shared.errors import ConfigError
from shared.misfit import misfit, misfits, there_are
from shared.written import reading, text_of

T = TypeVar("T", bound=msgspec.Struct)

V = TypeVar("V")
# A field that no file and no variable can set: other code is right only with this value, or nobody
# has a reason to change it. Tests pass other values as an argument.
Constant = Annotated[V, Meta(extra={"constant": True})]

SECTIONS = ("admission", "planner", "relegation", "worker", "gateway")
FLEET_KEYS = (
    "url",
    "creds",
    "tls_ca",
    "policy",
    "settings",
    "tiers",
    "default_tier",
    "tenants",
    "default_model",
    "aliases",
    "metrics_host",
    "metrics_port",
    "drain_s",
)
PREFIX = "SLACKLINE_"
USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")


class Connected(msgspec.Struct, frozen=True, kw_only=True):
    """The way to the NATS server; a part of every section."""

    url: str = "nats://127.0.0.1:4222"
    """The NATS server, or several with commas between them."""
    creds: str = ""
    """The file of this user's key at NATS: a seed, or credentials as `nsc` writes them. Empty: it
    logs in without.
    """
    tls_ca: str = ""
    """The file of the authority to trust at NATS; empty: those of the system."""


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """The address at which a process serves its metrics; a part of every section."""

    metrics_host: str = "127.0.0.1"
    """The address of its metrics."""
    metrics_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """The port of its metrics; 0: none are served."""


WATCHED = Watched.__struct_fields__


def settings_in(kind: type[msgspec.Struct]) -> list[msgspec.structs.FieldInfo]:
    """The fields that a file or a variable may set."""
    return [field for field in msgspec.structs.fields(kind) if not _constant(field.type)]


def _constant(kind: Any) -> bool:
    metas = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return any(isinstance(m, Meta) and m.extra and m.extra.get("constant") for m in metas)


def load(kind: type[T], section: str, environ: Mapping[str, str] | None = None) -> T:
    """The configuration of one service. Environment values are read as their type; lists, tables
    and structs are JSON. Raises ConfigError for unknown keys, wrong or missing values.
    """
    env = os.environ if environ is None else environ
    types = {f.name: f.type for f in settings_in(kind)}
    also = WATCHED if section != "gateway" else ()
    values = values_of(env, section, types, {*types, *also})
    missing = [f.name for f in msgspec.structs.fields(kind) if f.required and f.name not in values]
    if missing:
        raise ConfigError(
            f"{section}.{missing[0]} is required: set it under [{section}] "
            f"or in {PREFIX}{section.upper()}_{missing[0].upper()}"
        )
    try:
        return kind(**values)
    except ValueError as error:  # the struct's own check of several fields failed
        raise ConfigError(f"[{section}]: {error}") from error


def load_watched(section: str, environ: Mapping[str, str] | None = None) -> Watched:
    """The address of this process's metrics. Raises ConfigError; `load` checks all other keys."""
    env = os.environ if environ is None else environ
    types = {f.name: f.type for f in msgspec.structs.fields(Watched)}
    return Watched(**values_of(env, section, types, None))


def without_secrets(config: msgspec.Struct) -> dict[str, Any]:
    """The configuration as plain values for the log, without users and passwords of URLs."""
    plain: dict[str, Any] = msgspec.to_builtins(config, str_keys=True)
    return {
        name: USER_INFO.sub("***@", value) if isinstance(value, str) else value
        for name, value in plain.items()
    }


def authority(host: str, port: int) -> str:
    """A host and its port as a URL has them: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class MisfitError(ConfigError):
    """A value does not fit its type; `origin` names the innermost key, and where it was set."""

    def __init__(self, origin: str, place: str, why: str) -> None:
        key, space, where = origin.partition(" ")
        self.origin = f"{key}{place and f'.{place}'}{space}{where}"
        super().__init__(f"{self.origin}: {why}")


class Setting(NamedTuple):
    """A value that is set, where it was set, and its fault; one Setting for each fault."""

    name: str
    origin: str  # "admission.tiers in FILE", or the environment variable; with a fault its place
    value: Any
    error: str = ""


def settings_of(
    kind: type[msgspec.Struct], section: str, environ: Mapping[str, str]
) -> tuple[list[Setting], str]:
    """Each value that is set for a section, in the order in which values count (the last one wins),
    with its faults; then the fault of all values together, empty if there is none.
    """
    types = {f.name: f.type for f in settings_in(kind)}
    if section != "gateway":
        types |= {f.name: f.type for f in msgspec.structs.fields(Watched)}
    found: list[Setting] = []
    try:
        for name, origin, raw in _from_file(environ, section, types, None):
            found += _tried(name, origin, raw, types, section, _converted)
        for name, origin, text in _from_environment(environ, section, types, None):
            found += _tried(name, origin, text, types, section, _from_text)
        load(kind, section, environ)
    except ConfigError as error:
        return found, str(error)
    return found, ""


def _tried(
    name: str,
    origin: str,
    raw: Any,
    types: Mapping[str, Any],
    section: str,
    convert: Callable[[Any, Any, str], Any],
) -> Iterable[Setting]:
    shown = USER_INFO.sub("***@", raw) if isinstance(raw, str) else raw
    where = origin.removeprefix(f"{name} ")
    try:
        if where != origin:  # at the top of the file
            _check_known(name, (*SECTIONS, *FLEET_KEYS), where)
        _check_known(name, types, f"in [{section}]")
        convert(raw, types[name], origin)
    except MisfitError:
        for error in (MisfitError(origin, *each) for each in misfits(raw, types[name])):
            yield Setting(name, error.origin, shown, str(error))
    except ConfigError as error:
        yield Setting(name, origin, shown, str(error))
    else:
        yield Setting(name, origin, shown)


def files_of(environ: Mapping[str, str]) -> list[Path]:
    """The configuration file as a list, empty if none is named."""
    path = environ.get(f"{PREFIX}CONFIG")
    return [Path(path)] if path else []


def values_of(
    env: Mapping[str, str], section: str, types: Mapping[str, Any], known: Collection[str] | None
) -> dict[str, Any]:
    """The fields of `types` that are set. Keys not in `known` are errors (None: any may be)."""
    values: dict[str, Any] = {}
    for name, origin, raw in _from_file(env, section, types, known):
        if name in types:
            values[name] = _converted(raw, types[name], origin)
    for name, origin, text in _from_environment(env, section, types, known):
        if name in types:
            values[name] = _from_text(text, types[name], origin)
    return values


def _from_file(
    env: Mapping[str, str], section: str, types: Mapping[str, Any], known: Collection[str] | None
) -> Iterable[tuple[str, str, Any]]:
    path = env.get(f"{PREFIX}CONFIG")
    if not path:
        return
    with reading(f"the configuration {path} cannot be read"):
        tables = tomllib.loads(text_of(path))
    for key in tables:
        if known is not None:
            _check_known(key, (*SECTIONS, *FLEET_KEYS), f"at the top of {path}")
        if key not in SECTIONS and (key in types or key not in FLEET_KEYS):
            yield key, f"{key} at the top of {path}", tables[key]
    table = tables.get(section, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{section} in {path} must be a section, [{section}]")
    for key, raw in table.items():
        if known is not None:
            _check_known(key, known, f"in [{section}] of {path}")
        yield key, f"{section}.{key} in {path}", raw


def _from_environment(
    env: Mapping[str, str], section: str, types: Mapping[str, Any], known: Collection[str] | None
) -> Iterable[tuple[str, str, str]]:
    for key in FLEET_KEYS:
        variable = PREFIX + key.upper()
        if variable in env and key in types and _is_set(env[variable], key, types):
            yield key, variable, env[variable]
    own = f"{PREFIX}{section.upper()}_"
    for variable in sorted(v for v in env if v.startswith(own)):
        key = variable.removeprefix(own).lower()
        if known is not None:
            _check_known(key, known, f"in the environment ({variable})")
        if _is_set(env[variable], key, types):
            yield key, variable, env[variable]


def _is_set(text: str, name: str, types: Mapping[str, Any]) -> bool:
    """False for an empty text that means nothing: compose passes it for an unset variable."""
    return bool(text) or not (name == "url" or get_origin(types.get(name)) is dict)


def _check_known(key: str, known: Iterable[str], where: str) -> None:
    if key not in known:
        raise ConfigError(f"unknown key {key!r} {where}; {there_are(key, known)}")


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
    except RecursionError as error:
        raise ConfigError(f"{origin}: it is nested too deeply") from error


def _converted(raw: Any, kind: Any, origin: str) -> Any:
    with reading(origin):
        try:
            return msgspec.convert(raw, kind)
        except msgspec.ValidationError as error:
            raise MisfitError(origin, *misfit(raw, kind, error)) from error
