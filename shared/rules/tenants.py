"""The limits of each tenant: its weight beside other tenants, tokens a second, importance, SLO."""

import math
import tomllib
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from shared.errors import ConfigError, PeerError
from shared.misfit import SHA256, all_misfits
from shared.subjects import ID_PATTERN
from shared.vocabulary import Slo
from shared.written import reading, text_of

KeyHash = Annotated[str, Meta(pattern=SHA256)]
OTHERS = "*"  # the name of the limits for each tenant that has no entry of its own


class Tenant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of one tenant. An entry that sets none leaves it unlimited."""

    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """Its share beside tenants whose requests are equally important."""
    tokens_s: Annotated[float, Meta(gt=0)] = math.inf
    """Tokens of prompt and output a second, in the long run."""
    burst_tokens: Annotated[float, Meta(gt=0)] = 1_000_000.0
    """Tokens at once, beyond the long run."""
    importance: Annotated[float, Meta(gt=0, le=1e6)] = math.inf
    """The most importance that a request may have; absent: any, beside other tenants its tier's."""
    slo: Slo = Slo()
    """The tightest bounds that a request may ask for. A bound that is absent may be any."""
    lenient: bool | None = None
    """Leaves out fields that are not served; absent: as the gateway's."""
    shares_prefixes: bool = False
    """Its prompts may begin with KV that other tenants who share computed, and theirs with its."""
    keys: list[KeyHash] = []
    """SHA-256 of its HTTP keys, as `slackline key` prints them. With any, HTTP needs a key."""

    def check_slo(self, slo: Slo) -> None:
        """Raises PeerError if the SLO, with its bounds in seconds, is tighter than allowed."""
        for name in ("ttft_s", "tbt_s", "thinking_tbt_s", "ttlt_s", "task_ttlt_s"):
            least, asked = getattr(self.slo, name), getattr(slo, name)
            if least is not None and asked is not None and asked < least:
                raise PeerError(
                    f"this tenant may ask for a {name} of {least:g} s or more, not {asked:g} s",
                    code="permission_denied",
                    param=f"slo.{name}",
                )


class Tenants(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tenants that have limits; `*` stands for each tenant that is not named."""

    tenants: dict[str, Tenant] = {}

    def __post_init__(self) -> None:
        if faults := list(self._faults()):
            raise ValueError("; ".join(faults))

    def _faults(self) -> Iterator[str]:
        owners: dict[str, str] = {}
        for name, tenant in self.tenants.items():
            for key in tenant.keys:
                if owners.setdefault(key, name) != name:
                    yield f"tenants `{owners[key]}` and `{name}` have the same key, {key[:8]}..."
        for name, tenant in self.tenants.items():
            if name != OTHERS and not ID_PATTERN.fullmatch(name):
                yield (
                    f"tenant `{name}` must be {OTHERS}, or 1 to 64 characters of A-Z, a-z, 0-9, _"
                    " and -"
                )
            if name == OTHERS and tenant.keys:
                yield f"a key belongs to one tenant, not to `{OTHERS}`"
            if tenant.slo.in_multiples:
                yield f"tenant `{name}`: its slo must be in seconds"

    def named(self, name: str) -> Tenant:
        return self.tenants.get(name) or self.tenants.get(OTHERS) or UNLIMITED

    def most_importance(self, name: str, of_tier: float) -> float:
        """The most importance that a request of the tenant may have in a tier of importance
        `of_tier`. Beside others, only the operator grants more: a caller could evade the shares.
        """
        stated = self.named(name).importance
        beside_others = bool(self.tenants.keys() - {name})
        return of_tier if beside_others and math.isinf(stated) else stated


UNLIMITED = Tenant()


def load_tenants(path: str) -> Tenants:
    """The limits in a .toml file, or none. Raises a ConfigError with the fault and its place."""
    if not path:
        return Tenants()
    with reading(f"tenants: cannot read {path}"):
        text = text_of(path)
    with reading(f"tenants: {path} is not proper TOML"):
        raw: Any = tomllib.loads(text)
    with reading(f"tenants: {path}"):
        try:
            return msgspec.convert(raw, Tenants)
        except msgspec.ValidationError as error:
            raise ConfigError(f"tenants: {path}: {all_misfits(raw, Tenants)}") from error
