"""The options of drawing tokens that `slackline submit` and `slackline chat` share."""

import argparse

import msgspec

from shared.errors import ConfigError
from shared.schemas import Sampling

# what the schema takes, in words
TAKEN = {
    "max_tokens": "1 to 1000000",
    "temperature": "0 to 2",
    "seed": "a whole number of at most 64 bits",
}


def sampling_of(args: argparse.Namespace) -> Sampling:
    """The sampling of --max-tokens, --temperature and --seed. Raises ConfigError."""
    for name, taken in TAKEN.items():
        try:
            msgspec.convert({name: getattr(args, name)}, Sampling)
        except msgspec.ValidationError as error:
            raise ConfigError(f"--{name.replace('_', '-')} must be {taken}") from error
    return Sampling(**{name: getattr(args, name) for name in TAKEN})
