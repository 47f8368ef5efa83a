"""Loads policies that are not part of this project: FILE.py:CLASS, or the entry point of an
installed package. docs/write-a-policy.md has an example.
"""

from functools import cache
from importlib.metadata import entry_points
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any, get_type_hints

import msgspec

from shared.errors import ConfigError

GROUP = "slackline.policies"  # of entry points


@cache
def load(name: str) -> type[Any] | None:
    """The class of a policy; None where `name` names none outside. Raises ConfigError."""
    file, colon, wanted = name.rpartition(":")
    if colon and file.endswith(".py"):
        return _in_file(file, wanted)
    for found in entry_points(group=GROUP, name=name):
        loaded: type[Any] = found.load()
        return loaded
    return None


def settings_of(policy: type[Any]) -> type[msgspec.Struct]:
    """The struct that the policy's constructor takes as `settings`. Raises ConfigError."""
    kind = get_type_hints(policy.__init__).get("settings")
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        raise ConfigError(
            f"{policy.__name__}.__init__ must take `settings`, annotated with a msgspec.Struct"
        )
    return kind


def _in_file(file: str, wanted: str) -> type[Any]:
    spec = spec_from_file_location("slackline_foreign_policy", file)
    assert spec is not None and spec.loader is not None, file
    module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"policy {file}: {type(error).__name__}: {error}") from error
    found = getattr(module, wanted, None)
    if isinstance(found, type) and hasattr(found, "plan"):
        return found
    policies = [name for name, each in vars(module).items() if hasattr(each, "plan")]
    raise ConfigError(
        f"policy {file} has no class {wanted!r} with a `plan`; there are: {', '.join(policies)}"
    )
