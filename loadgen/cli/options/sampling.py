"""The options of drawing tokens that `slackline submit` and `slackline chat` share."""

import argparse

import msgspec

from loadgen.cli.options.option import add_options
from shared.errors import ConfigError
from shared.schemas import Sampling

# what the schema takes, in words
TAKEN = {
    "max_tokens": "1 to 1000000",
    "temperature": "0 to 2",
    "seed": "a whole number of at most 64 bits",
}


def add_sampling_arguments(parser: argparse.ArgumentParser, temperature: float) -> None:
    add_options(
        parser,
        f"""
        --max-tokens N = 256: longest answer, in tokens; cut to what the context has room for
        --temperature T = {temperature}: sampling temperature; 0 is greedy
        --seed K (int): random seed; the same seed and questions give the same answers
        """,
    )


def sampling_of(args: argparse.Namespace) -> Sampling:
    """The sampling of --max-tokens, --temperature and --seed. Raises ConfigError."""
    for name, taken in TAKEN.items():
        try:
            msgspec.convert({name: getattr(args, name)}, Sampling)
        except msgspec.ValidationError as error:
            raise ConfigError(f"--{name.replace('_', '-')} must be {taken}") from error
    return Sampling(**{name: getattr(args, name) for name in TAKEN})
