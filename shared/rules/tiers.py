"""Tier sets: named SLOs, the share of the load of each, and the name in HTTP's `service_tier`."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from shared.errors import ConfigError, PeerError
from shared.misfit import all_misfits
from shared.rules.model_names import ModelName
from shared.subjects import ID_PATTERN
from shared.vocabulary import Definition, Slo
from shared.written import reading, text_of

T = TypeVar("T")
AUTO = "auto"  # in place of a tier: the default one


class Tier(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The SLO of one kind of caller."""

    slo: Slo
    """Time to first token, between tokens, to last token; any may be absent, not all."""
    models: dict[ModelName, Slo] = {}
    """Its SLO at the models that are named here, in place of `slo`."""
    share: Annotated[float, Meta(ge=0)] = 1.0
    """Its part of a load that is drawn (`slackline load`, `simulate`), beside the other tiers."""
    service_tier: str | None = None
    """The `service_tier` of HTTP that names it; absent: its own name alone does."""
    importance: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    """Multiplies the importance of its requests. The unimportant are relegated first."""
    last_round: str | None = None
    """The tier of the last round of a session in this tier; absent: this tier, too."""
    wait_s: Annotated[float, Meta(gt=0)] | None = None
    """The longest that a best-effort request waits for its first token; absent: till it expires."""
    objective: Annotated[float, Meta(gt=0, lt=1)] = 0.99
    """The share of its offered requests that is to meet the SLO, for alerts."""

    def slo_of(self, model: str) -> Slo:
        """The SLO of its requests to this model."""
        return self.models.get(model, self.slo)


class TierSet(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tiers of one deployment, tightest first. Without a name a request goes to `default`."""

    name: str
    default: str
    tiers: dict[str, Tier]

    def __post_init__(self) -> None:
        if not self.tiers:
            raise ValueError("there must be at least one tier")
        if faults := list(self._faults()):
            raise ValueError("; ".join(faults))

    def _faults(self) -> Iterator[str]:
        if self.default not in self.tiers:
            yield (
                f"default is `{self.default}`, "
                f"which is not one of the tiers {', '.join(self.tiers)}"
            )
        for name, tier in self.tiers.items():
            if not ID_PATTERN.fullmatch(name):
                yield f"tier name `{name}` must be 1 to 64 characters of A-Z, a-z, 0-9, _ and -"
            if name == AUTO:
                yield f"tier name `{AUTO}` is taken: it stands for the default tier"
            if any(slo.bounds_nothing for slo in (tier.slo, *tier.models.values())):
                yield f"tier `{name}` has an SLO without any bound"
            if tier.last_round is not None and tier.last_round not in self.tiers:
                yield (
                    f"tier `{name}`: its last_round is `{tier.last_round}`, "
                    "which is not one of the tiers"
                )
        if sum(tier.share for tier in self.tiers.values()) <= 0:
            yield "the shares of the tiers are all zero"
        claimed = [
            tier.service_tier for tier in self.tiers.values() if tier.service_tier is not None
        ]
        if len(claimed) != len(set(claimed)):
            yield "two tiers claim the same service_tier"

    def named(self, name: str) -> Tier:
        """The tier of this name. Raises PeerError, since names come from clients."""
        tier = self.tiers.get(name)
        if tier is None:
            raise PeerError(
                f"unknown tier `{name[:64]}`; known: {', '.join(self.tiers)}",
                code="unknown_tier",
                param="tier",
            )
        return tier

    def asked(self, name: str) -> str:
        """The tier that a subject names: `auto` stands for the default one."""
        return self.default if name == AUTO else name

    def judged_by(self, definition: Definition | None) -> "TierSet":
        """The same tiers, all judged by this definition; None: each by its own."""
        if definition is None:
            return self
        judged = {
            name: replace(
                tier,
                slo=replace(tier.slo, definition=definition),
                models={
                    model: replace(slo, definition=definition) for model, slo in tier.models.items()
                },
            )
            for name, tier in self.tiers.items()
        }
        return replace(self, tiers=judged)

    @property
    def definition(self) -> str:
        """The definitions by which the set's SLOs are judged, in words."""
        return ", ".join(dict.fromkeys(tier.slo.definition for tier in self.tiers.values()))

    def for_service_tier(self, value: str | None) -> str:
        """The tier for a `service_tier`, also a tier's own name; None, `auto`: the default. Raises
        PeerError for others.
        """
        if value is None or value == AUTO:
            return self.default
        for name, tier in self.tiers.items():
            if value in (name, tier.service_tier):
                return name
        known = [
            AUTO,
            *(t.service_tier for t in self.tiers.values() if t.service_tier is not None),
            *self.tiers,
        ]
        raise PeerError(
            f"unknown service_tier `{value[:64]}`; known: {', '.join(known)}",
            code="invalid_value",
            param="service_tier",
        )


DEFAULT = TierSet(
    name="default",
    default="chat",
    tiers={
        # An autocompletion keeps up with the eye: a token every 30 ms.
        "interactive": Tier(
            slo=Slo(ttft_s=0.5, tbt_s=0.03), share=0.3, service_tier="priority", wait_s=120.0
        ),
        # A chat answer begins within a second and is then read at about ten tokens a second.
        "chat": Tier(
            slo=Slo(ttft_s=1.0, tbt_s=0.1), share=0.4, service_tier="default", wait_s=120.0
        ),
        "summary": Tier(slo=Slo(ttlt_s=600.0), share=0.2, service_tier="flex", wait_s=3600.0),
        "batch": Tier(slo=Slo(ttlt_s=86_400.0), share=0.1),
    },
)

# QoServe Table 3 (section 4, "Workloads"): three classes in equal shares.
QOSERVE_3 = TierSet(
    name="qoserve-3",
    default="Q1",
    tiers={
        "Q1": Tier(slo=Slo(ttft_s=6.0, tbt_s=0.05), service_tier="priority"),
        "Q2": Tier(slo=Slo(ttlt_s=600.0), service_tier="default"),
        "Q3": Tier(slo=Slo(ttlt_s=1800.0), service_tier="flex"),
    },
)

# The same three kinds of caller, with deadlines that a demonstration of one minute can meet and can
# miss.
DEMO_3 = TierSet(
    name="demo-3",
    default="interactive",
    tiers={
        "interactive": Tier(slo=Slo(ttft_s=2.0, tbt_s=0.06), service_tier="priority"),
        "summary": Tier(slo=Slo(ttlt_s=25.0), service_tier="default"),
        "batch": Tier(slo=Slo(ttlt_s=60.0), service_tier="flex"),
    },
)

# SLOs-Serve Tables 1 and 3 (sections 1 and 6): a prefill may take 3 (tight) or 5 (loose) times as
# long as by itself, and any 10 tokens may take 50 or 100 ms a token on average. Table 1 says which
# scenario is tight in which stage. The paper gives no shares for the mixed scenario; here they are
# equal.
_TIGHT_X, _LOOSE_X, _TIGHT_S, _LOOSE_S = 3, 5, 0.05, 0.1
_SLOS_SERVE = {
    "coder": Slo(ttft_x=_LOOSE_X, tbt_s=_TIGHT_S),
    "chatbot": Slo(ttft_x=_LOOSE_X, tbt_s=_LOOSE_S),
    "summarizer": Slo(ttft_x=_TIGHT_X, tbt_s=_LOOSE_S),
}

SLOS_SERVE = (
    *(
        TierSet(name=f"slos-serve-{kind}", default=kind, tiers={kind: Tier(slo=slo)})
        for kind, slo in _SLOS_SERVE.items()
    ),
    TierSet(
        name="slos-serve-mixed",
        default="chatbot",
        tiers={kind: Tier(slo=slo) for kind, slo in _SLOS_SERVE.items()},
    ),
    # Fast thinking, then a response at reading speed.
    TierSet(
        name="slos-serve-reasoning",
        default="reasoning",
        tiers={
            "reasoning": Tier(slo=Slo(ttft_x=_TIGHT_X, thinking_tbt_s=_TIGHT_S, tbt_s=_LOOSE_S))
        },
    ),
    # A fast loop of tool calls and tool responses, each one a round; a person reads the last one.
    TierSet(
        name="slos-serve-toolllm",
        default="tool-call",
        tiers={
            "tool-call": Tier(slo=Slo(ttft_x=_TIGHT_X, tbt_s=_TIGHT_S), last_round="answer"),
            "answer": Tier(slo=Slo(ttft_x=_TIGHT_X, tbt_s=_LOOSE_S), share=0.0),
        },
    ),
)

# AdaServe Table 2 and section 6.2: a time per token only. A first token has no deadline; coding is
# held to 1.2 times the time per token of a single request.
ADASERVE_3 = TierSet(
    name="adaserve-3",
    default="chat",
    tiers={
        "coding": Tier(slo=Slo(tbt_x=1.2), share=0.6, service_tier="priority"),
        "chat": Tier(slo=Slo(tbt_s=0.05), share=0.2, service_tier="default"),
        "summary": Tier(slo=Slo(tbt_s=0.15), share=0.2, service_tier="flex"),
    },
)

# SOLA Table 3 (section 6.1): TTFT and mean TPOT, tight and loose, for each of its models, with one
# kind of caller.
_SOLA_TABLE_3 = {
    "llama3-8b": ((0.4, 0.15), (0.6, 0.225)),
    "llama3-70b": ((0.5, 0.2), (1.0, 0.4)),
    "qwen1.5-14b": ((0.8, 0.2), (1.2, 0.3)),
    "vicuna1.5-7b-16k": ((2.55, 0.16), (3.825, 0.24)),
    "qwen1.5-72b": ((2.425, 0.2), (4.85, 0.4)),
}
# SOLA's rule for a model that is not in the table (sections 6.1 and 6.5): a multiple of the time
# that a single request takes, here separately for each of the two bounds.
_SOLA_TIMES = (5, 10, 15, 20)

SOLA = tuple(
    TierSet(
        name=f"sola-{model}-{kind}",
        default="chat",
        tiers={"chat": Tier(slo=Slo(ttft_s=ttft_s, tbt_s=tbt_s))},
    )
    for model, bounds in _SOLA_TABLE_3.items()
    for kind, (ttft_s, tbt_s) in zip(("tight", "loose"), bounds, strict=True)
) + tuple(
    TierSet(name=f"sola-{x}x", default="chat", tiers={"chat": Tier(slo=Slo(ttft_x=x, tbt_x=x))})
    for x in _SOLA_TIMES
)

# Ascendra Table 2 (section 8.1): TTFT and mean TBT. Mistral-7B and Llama3.1-8B share one row;
# Qwen-14B has another.
_ASCENDRA_TABLE_2 = {
    "8b-sharegpt": (1.0, 0.15),
    "8b-longbench": (2.5, 0.15),
    "14b-sharegpt": (1.5, 0.15),
    "14b-longbench": (3.0, 0.15),
}

ASCENDRA = tuple(
    TierSet(
        name=f"ascendra-{kind}",
        default="chat",
        tiers={"chat": Tier(slo=Slo(ttft_s=ttft_s, tbt_s=tbt_s))},
    )
    for kind, (ttft_s, tbt_s) in _ASCENDRA_TABLE_2.items()
)

BUILT_IN = {
    tiers.name: tiers
    for tiers in (DEFAULT, QOSERVE_3, DEMO_3, *SLOS_SERVE, ADASERVE_3, *SOLA, *ASCENDRA)
}


class _Configuration(Struct, frozen=True, kw_only=True):
    """The part of a configuration file that is about tiers."""

    tiers: str | dict[str, Tier] = ""
    default_tier: str = ""


def load_tiers(name_or_path: str) -> TierSet:
    """A built-in set by its name, a set from a .toml or .json file, or the tiers of a configuration
    file. Raises a ConfigError that names the fault and its place.
    """
    if name_or_path in BUILT_IN:
        return BUILT_IN[name_or_path]
    path, raw = _parsed(name_or_path)
    if "name" in raw or "default" in raw:
        return _converted(path, raw, TierSet)
    if "tiers" not in raw and "default_tier" not in raw:
        raise ConfigError(f"tiers: {path} has no tiers: write [tiers.NAME] in it")
    written = _converted(path, raw, _Configuration)
    if written.tiers in ("", *BUILT_IN) or not isinstance(written.tiers, str):
        return tiers_of(written.tiers, written.default_tier)
    known = _converted(*_parsed(written.tiers), TierSet)  # a set: no file leads back to itself
    return tiers_of(known.tiers, written.default_tier or known.default)


def tiers_of(source: str | dict[str, Tier], default_tier: str) -> TierSet:
    """The tiers of a configuration, written or named; built in if empty. Raises ConfigError."""
    if isinstance(source, str):
        known = load_tiers(source) if source else DEFAULT
        name, default, tiers = known.name, default_tier or known.default, known.tiers
    else:
        name, default, tiers = "configured", default_tier or next(iter(source), ""), source
    try:
        return TierSet(name=name, default=default, tiers=tiers)
    except ValueError as error:
        raise ConfigError(f"tiers: {error}") from error


def _parsed(name_or_path: str) -> tuple[Path, dict[str, Any]]:
    path = Path(name_or_path)
    if path.suffix not in (".toml", ".json"):
        raise ConfigError(
            f"tiers `{name_or_path}`: neither a built-in set ({', '.join(BUILT_IN)}) "
            "nor a .toml or .json file"
        )
    with reading(f"tiers: cannot read {path}"):
        text = text_of(path)
    with reading(f"tiers: {path} is not proper {path.suffix[1:].upper()}"):
        raw: Any = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    return path, _converted(path, raw, dict[str, Any])


def _converted(path: Path, raw: Any, kind: type[T]) -> T:
    with reading(f"tiers: {path}"):
        try:
            return msgspec.convert(raw, kind)
        except msgspec.ValidationError as error:
            raise ConfigError(f"tiers: {path}: {all_misfits(raw, kind)}") from error
