"""The settings of a service as data: each field with its meaning, its value, where that was set,
and its faults. `python -m services.<name> --settings` prints it as JSON for `slackline config`.
"""

import ast
import contextlib
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from textwrap import dedent
from typing import Any, TypeVar

import msgspec
from msgspec import NODEFAULT, Struct

from shared.errors import ConfigError
from shared.process.configuration import (
    FLEET_KEYS,
    Setting,
    Watched,
    load,
    settings_in,
    settings_of,
    values_of,
)
from shared.process.reload import LIVE
from shared.rules.tenants import Tenant
from shared.rules.tiers import Tier
from shared.vocabulary import Slo

C = TypeVar("C", bound=Struct)
NESTED: tuple[type[Struct], ...] = (Tier, Tenant, Slo)
REF = "#/$defs/{name}"


class Field(Struct, frozen=True, kw_only=True):
    name: str
    meaning: str
    default: Any
    fleet: bool  # may stand at the top of the file, for all services
    live: bool  # a running service takes over a change


class Described(Struct, frozen=True, kw_only=True):
    section: str
    fields: list[Field]
    set: list[Setting]
    faults: list[str]  # of the section as a whole
    warnings: list[str]  # consequences that an operator may not expect
    schema: dict[str, Any]  # JSON Schema of the section
    definitions: dict[str, Any]  # the schemas that `schema` refers to


class _NotKnown(Exception):
    """Raised if a check reads a value that has a fault itself."""


class _Fitting:
    """The fitting values of a section that cannot be loaded as a whole, for the checks."""

    def __init__(self, kind: type[Struct], section: str, env: Mapping[str, str], wrong: set[str]):
        fields = [f for f in msgspec.structs.fields(kind) if f.name not in wrong]
        self.__dict__ |= {f.name: _default(f) for f in fields if not f.required}
        self.__dict__ |= values_of(env, section, {f.name: f.type for f in fields}, None)

    def __getattr__(self, name: str) -> Any:
        raise _NotKnown


def describe(section: str, kind: type[C], checks: Sequence[Callable[[C], object]]) -> Described:
    """The settings of a section. Each check raises ConfigError for a configuration that the service
    would refuse when it starts, and may return a warning in words. A check that reads a value that
    is wrong itself is left out.
    """
    kinds: tuple[type[Struct], ...] = (kind,) if section == "gateway" else (kind, Watched)
    found, fault = settings_of(kind, section, os.environ)
    wrong = {setting.name for setting in found if setting.error}
    faults, warnings = [fault] if fault and not wrong else [], []
    with contextlib.suppress(ConfigError):  # `fault` tells of a file that cannot be read
        cfg: Any = _Fitting(kind, section, os.environ, wrong) if fault else load(kind, section)
        for check in checks:
            try:
                if isinstance(told := check(cfg), str):
                    warnings.append(told)
            except ConfigError as error:
                faults.append(str(error))
            except _NotKnown:
                pass
    schemas = [_schema(one) for one in kinds]
    own = schemas[0][0]
    own["properties"] |= {
        name: each for one, _ in schemas for name, each in one["properties"].items()
    }
    return Described(
        section=section,
        fields=[field for one in kinds for field in _fields(one)],
        set=found,
        faults=list(dict.fromkeys(faults)),
        warnings=warnings,
        schema=own,
        definitions={name: each for _, more in schemas for name, each in more.items()},
    )


def _fields(kind: type[Struct]) -> list[Field]:
    docs = field_docs(kind)
    return [
        Field(
            name=field.name,
            meaning=docs.get(field.name, ""),
            default=_default(field),
            fleet=field.name in FLEET_KEYS,
            live=field.name in LIVE,
        )
        for field in settings_in(kind)
    ]


def _default(field: msgspec.structs.FieldInfo) -> Any:
    value = field.default if field.default is not NODEFAULT else field.default_factory
    return value() if callable(value) else None if value is NODEFAULT else value


def _schema(kind: type[Struct]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of a struct, and those that it refers to, with the meaning of each field."""
    (_,), made = msgspec.json.schema_components((kind,), ref_template=REF)
    for one in (kind, *NESTED):
        if one.__name__ not in made:
            continue
        for name, meaning in field_docs(one).items():
            made[one.__name__]["properties"][name]["description"] = meaning
    own = made.pop(kind.__name__)
    names = {field.name for field in settings_in(kind)}
    own["properties"] = {n: each for n, each in own["properties"].items() if n in names}
    return _finite(own), _finite(made)


def _finite(schema: Any) -> Any:
    """The schema without infinite defaults, which JSON cannot hold: such a bound is absent."""
    if isinstance(schema, dict):
        return {
            key: _finite(value)
            for key, value in schema.items()
            if not (key == "default" and value == math.inf)
        }
    return [_finite(value) for value in schema] if isinstance(schema, list) else schema


def field_docs(kind: type[Struct]) -> dict[str, str]:
    """The strings below the fields, also those of base classes."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, Struct) and base is not Struct:
            found |= _of_class(base)
    return found


def _of_class(kind: type[Any]) -> dict[str, str]:
    tree = ast.parse(dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            found[field.target.id] = " ".join(below.value.value.split())
    return found
