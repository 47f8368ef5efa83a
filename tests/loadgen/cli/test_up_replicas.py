"""Tests of `slackline up --replicas N..M`."""

import argparse

import pytest

from loadgen.cli.up import add_arguments, make_spec, replicas_of
from loadgen.fleet.fleet import FleetSpec
from shared.errors import ConfigError


def spec_of(*options: str) -> FleetSpec:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return make_spec(parser.parse_args(["--engine", "sim", *options]))


def test_one_number_is_always_so_many_and_two_are_the_fewest_and_the_most() -> None:
    assert (spec_of("--replicas", "3").replicas, spec_of("--replicas", "3").most) == (3, 0)
    spec = spec_of("--replicas", "1..8", "--warm-up", "30")
    assert (spec.replicas, spec.most, spec.places) == (1, 8, 8)
    assert spec.environment["SLACKLINE_RELEGATION_WARM_UP_S"] == "30.0"


@pytest.mark.parametrize("text", ["1..", "..8", "two", "1..x", "-1"])
def test_anything_else_is_refused_with_the_way_to_write_it(text: str) -> None:
    with pytest.raises(ConfigError, match=r"as 1\.\.8"):
        replicas_of(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--replicas", "4..2"), "fewer than the fewest"),
        (("--replicas", "4", "--warm-up", "3"), "needs --replicas"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(options: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        spec_of(*options)
