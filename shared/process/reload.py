"""Lets a running service take changed rules at once; other settings wait for its next start."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from shared.errors import ConfigError
from shared.process import logs
from shared.process.configuration import files_of, load
from shared.rules.model_names import Aliases, ModelNames
from shared.rules.rules import Rules, TenantSource, TierSource, read_rules
from shared.rules.tiers import TierSet, tiers_of

LOOK_S = 1.0  # between two looks at the files
FILES = ("tiers", "tenants", "keys")  # settings that may name a file
LIVE = (*FILES, "default_tier", "default_model", "aliases")
log = logs.logger()


class Ruled(Protocol):
    """The configuration of a service that goes by rules."""

    @property
    def tiers(self) -> TierSource: ...
    @property
    def default_tier(self) -> str: ...
    @property
    def tenants(self) -> TenantSource: ...
    @property
    def default_model(self) -> str: ...
    @property
    def aliases(self) -> Aliases: ...


R = TypeVar("R", bound=msgspec.Struct)
Stamp = Sequence[tuple[int, int] | None]


def rules_of(cfg: Ruled) -> Rules:
    """The rules of a section; only the gateway has keys. Raises ConfigError."""
    names = ModelNames(default=cfg.default_model, aliases=cfg.aliases)
    rules = read_rules(cfg.tiers, cfg.default_tier, cfg.tenants, getattr(cfg, "keys", None))
    return replace(rules, models=names)


def tiers_in(cfg: Ruled) -> TierSet:
    """The tiers of a section. Raises ConfigError."""
    return tiers_of(cfg.tiers, cfg.default_tier)


async def follow_files(section: str, cfg: R, rules: Rules) -> None:
    """Take the rules over into `rules` when a file of the configuration changes, and log it, until
    cancelled. A file is read once it has not changed for LOOK_S, so that none is read half-written.
    A faulty file is refused, and the rules stay.
    """
    newest = cfg  # may name other files than the process began with
    taken = seen = _stamp(_files(newest))
    while True:
        await asyncio.sleep(LOOK_S)
        before, seen = seen, _stamp(_files(newest))
        if seen == taken or seen != before:
            continue
        taken = seen
        try:
            new = load(type(cfg), section)
            changed = rules.take(rules_of(new))  # type: ignore[arg-type]
        except Exception as error:  # no fault in a file ends a service
            known = isinstance(error, ConfigError)
            log.error("config.refused", error=str(error) if known else repr(error)[:1000])
            continue
        later = [
            field
            for field in cfg.__struct_fields__
            if field not in LIVE and getattr(new, field) != getattr(cfg, field)
        ]
        log.info("config.taken", changed=changed, at_the_next_start=later)
        if _files(new) != _files(newest):
            taken = ()  # read once more: a file that is named now may have changed meanwhile
        newest = new


def _files(cfg: object) -> list[Path]:
    named = [getattr(cfg, field, "") for field in FILES]
    return files_of(os.environ) + [Path(name) for name in named if name and isinstance(name, str)]


def _stamp(files: Sequence[Path]) -> Stamp:
    return [_stamp_of(file) for file in files]


def _stamp_of(file: Path) -> tuple[int, int] | None:
    """Time and size of the file; None if there is no such file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
