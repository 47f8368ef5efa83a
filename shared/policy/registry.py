"""The policies by name, each with its settings and its routing. Settings come from the command line
or a configuration.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec

from shared.errors import ConfigError
from shared.policy import foreign, qoserve, sarathi, vllm
from shared.policy.adaserve import policy as adaserve
from shared.policy.ascendra import policy as ascendra
from shared.policy.seam import Policy
from shared.policy.slackline import policy as slackline
from shared.policy.slos_serve import policy as slos_serve
from shared.policy.sola import policy as sola
from shared.routing.pipeline import Router
from shared.routing.routings import named


class Entry(NamedTuple):
    """One policy. Its settings name its routing, and the settings' defaults its default routing."""

    settings: type[msgspec.Struct]
    policy: Callable[[Any], Policy]  # from the settings
    # the routing that the setting `router` names
    router: Callable[[Any], Router] = lambda settings: named(settings.router)


DEFAULT = "slackline"
POLICIES: dict[str, Entry] = {
    **{name: Entry(sarathi.Settings, partial(sarathi.Sarathi, name)) for name in sarathi.ORDERS},
    "qoserve": Entry(qoserve.Settings, qoserve.QoServe),
    "adaserve": Entry(adaserve.Settings, adaserve.AdaServe),
    "ascendra": Entry(ascendra.Settings, ascendra.Ascendra, ascendra.routing),
    "slackline": Entry(slackline.Settings, slackline.Slackline),
    "slos_serve": Entry(slos_serve.Settings, slos_serve.SlosServe, slos_serve.routing),
    "sola": Entry(sola.Settings, sola.Sola),
    "vllm": Entry(vllm.Settings, vllm.Vllm),
}


def names() -> list[str]:
    return list(POLICIES)


def make(name: str, settings: Mapping[str, str] | None = None) -> Policy:
    """A fresh policy. Each replica needs one of its own, since policies learn. Numbers and booleans
    may be given as text.

    Raises: ConfigError for an unknown name or setting, or a value that does not fit.
    """
    return _entry(name).policy(_settings(name, settings))


def router(name: str, settings: Mapping[str, str] | None = None) -> Router:
    """A fresh router, as the policy of this name and these settings wants it. Each admission needs
    one of its own, since pickers count.

    Raises: ConfigError as `make` does.
    """
    return _entry(name).router(_settings(name, settings))


def _entry(name: str) -> Entry:
    if name in POLICIES:
        return POLICIES[name]
    if (policy := foreign.load(name)) is None:
        raise ConfigError(
            f"no policy is called {name!r}; there are: {', '.join(names())}, and yours as "
            "FILE.py:CLASS"
        )
    router = getattr(policy, "routing", _attainable)
    return Entry(foreign.settings_of(policy), policy, router)


def _attainable(settings: msgspec.Struct) -> Router:
    """The routing that the settings name, if they do."""
    return named(getattr(settings, "router", "attainable"))


def _settings(name: str, settings: Mapping[str, str] | None) -> msgspec.Struct:
    kind = _entry(name).settings
    fields = {f.name: f for f in msgspec.structs.fields(kind)}
    known = ", ".join(f"{key}={field.default}" for key, field in fields.items())
    unknown = sorted(set(settings or {}) - set(fields))
    if unknown:
        raise ConfigError(
            f"policy {name} has no setting {', '.join(unknown)}; "
            f"there are, with their defaults: {known}"
        )
    try:
        return msgspec.convert(dict(settings or {}), kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"policy {name}: {error}; settings with their defaults: {known}"
        ) from error
