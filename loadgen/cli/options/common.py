"""The options and checks that commands of all kinds share."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from loadgen.cli.options.option import add_options
from loadgen.fleet.gpus import cores
from shared.errors import BusError, ConfigError, NoResponders
from shared.subjects import ID_PATTERN
from shared.vocabulary import Role


def add_jobs_argument(parser: argparse.ArgumentParser) -> None:
    text = "number of processes; it does not change the results (default: the number of cores)"
    add_options(parser, f"--jobs N = {cores()}: {text}")


def add_plots_argument(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "--plots DIR: write plots to DIR, as SVG")


def check_id(option: str, value: str | None) -> None:
    """Raises ConfigError for a value that is no valid id."""
    if value is not None and not ID_PATTERN.fullmatch(value):
        raise ConfigError(f"{option} must be 1 to 64 characters of A-Z, a-z, 0-9, _ and -")


def parse_pairs(option: str, pairs: Sequence[str]) -> dict[str, str]:
    """The values by key. Raises ConfigError for a malformed pair or a repeated key."""
    values = dict[str, str]()
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ConfigError(f"{option} {pair}: expected KEY=VALUE")
        if key in values:
            raise ConfigError(f"{option}: {key} is given twice")
        values[key] = value
    return values


def parse_roles(text: str) -> list[Role]:
    """The roles of --roles. Raises ConfigError for a word that is none."""
    roles = [each for each in text.split(",") if each]
    if any(each not in list(Role) for each in roles):
        raise ConfigError(f"--roles {text}: a role is {', '.join(Role)}")
    return [Role(each) for each in roles]


@contextmanager
def awaiting_admission(url: str) -> Iterator[None]:
    """If no admission service answers, raises a BusError that says what to do."""
    try:
        yield
    except NoResponders as error:
        raise BusError(
            f"{url} has no admission service: start a fleet with `slackline up`"
        ) from error
