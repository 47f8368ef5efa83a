"""Policies by the name they are chosen by, and their settings from the command line or a
configuration.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from shared.errors import ConfigError
from shared.policy import qoserve, sarathi, vllm
from shared.policy.adaserve import policy as adaserve
from shared.policy.ascendra import policy as ascendra
from shared.policy.seam import Policy
from shared.policy.slos_serve import policy as slos_serve
from shared.policy.sola import policy as sola

_POLICIES: dict[str, tuple[type[msgspec.Struct], Callable[[Any], Policy]]] = {
    **{name: (sarathi.Settings, partial(sarathi.Sarathi, name)) for name in sarathi.ORDERS},
    "qoserve": (qoserve.Settings, qoserve.QoServe),
    "adaserve": (adaserve.Settings, adaserve.AdaServe),
    "ascendra": (ascendra.Settings, ascendra.Ascendra),
    "slos_serve": (slos_serve.Settings, slos_serve.SlosServe),
    "sola": (sola.Settings, sola.Sola),
    "vllm": (vllm.Settings, vllm.Vllm),
}


def names() -> list[str]:
    return list(_POLICIES)


def make(name: str, settings: Mapping[str, str] | None = None) -> Policy:
    """A fresh policy; one is needed per replica, since it learns. Numbers and booleans may be given
    as text.

    Raises: ConfigError for an unknown name or setting, or a value that does not fit.
    """
    if name not in _POLICIES:
        raise ConfigError(f"no policy is called {name!r}; there are: {', '.join(names())}")
    kind, build = _POLICIES[name]
    fields = {f.name: f for f in msgspec.structs.fields(kind)}
    known = ", ".join(f"{key}={field.default}" for key, field in fields.items())
    unknown = sorted(set(settings or {}) - set(fields))
    if unknown:
        raise ConfigError(
            f"policy {name} has no setting {', '.join(unknown)}; "
            f"there are, with their defaults: {known}"
        )
    try:
        return build(msgspec.convert(dict(settings or {}), kind, strict=False))
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"policy {name}: {error}; settings with their defaults: {known}"
        ) from error
