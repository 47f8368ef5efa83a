"""The rules that change while a fleet runs: tiers, tenants' limits, HTTP keys, names of models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shared.errors import ConfigError
from shared.rules import http_keys
from shared.rules.http_keys import HttpKeys
from shared.rules.model_names import ModelNames
from shared.rules.tenants import Tenant, Tenants, load_tenants
from shared.rules.tiers import DEFAULT, Tier, TierSet, tiers_of

TierSource = str | dict[str, Tier]
TenantSource = str | dict[str, Tenant]


@dataclass(slots=True)
class Rules:
    """The rules now in force: one object for all that go by them; `take` changes it in place."""

    tiers: TierSet = DEFAULT
    tenants: Tenants = field(default_factory=Tenants)
    keys: HttpKeys | None = None  # None: HTTP needs no key
    models: ModelNames = field(default_factory=ModelNames)

    def take(self, new: "Rules") -> list[str]:
        """Go by the new rules from now on; returns the names of those that differ. Raises
        ConfigError, and changes nothing, if HTTP would no longer need keys.
        """
        if self.keys is not None and new.keys is None:
            raise ConfigError("no key is left: a gateway that had keys is opened by a restart only")
        changed = [name for name in self.__slots__ if getattr(self, name) != getattr(new, name)]
        for name in changed:
            setattr(self, name, getattr(new, name))
        return changed


def read_rules(
    tiers: TierSource, default_tier: str, tenants: TenantSource, keys: str | None = ""
) -> Rules:
    """The rules of a configuration. `tiers` and `tenants` are written there, or name a file;
    `tiers` may name a built-in set. Keys are in the file `keys` and in `tenants`; with `keys` None
    they are not read. Raises ConfigError.
    """
    limits = read_tenants(tenants)
    known = None if keys is None else _keys(keys, limits.tenants)
    return Rules(tiers_of(tiers, default_tier), limits, known)


def read_tenants(source: TenantSource) -> Tenants:
    """The limits and keys of tenants. Raises ConfigError."""
    if isinstance(source, str):
        return load_tenants(source)
    try:
        return Tenants(tenants=source)
    except ValueError as error:
        raise ConfigError(f"tenants: {error}") from error


def _keys(path: str, tenants: Mapping[str, Tenant]) -> HttpKeys | None:
    written = {key: name for name, tenant in tenants.items() for key in tenant.keys}
    if path:
        return http_keys.read(Path(path)).with_more(written)
    return HttpKeys(written) if written else None
