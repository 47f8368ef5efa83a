"""The options that say the way to a NATS server."""

import argparse

import pytest

from loadgen.access import DEFAULT_URL, add_access_arguments


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLACKLINE_URL", "")
    parser = argparse.ArgumentParser()
    add_access_arguments(parser, "the operator")
    assert parser.parse_args([]).url == DEFAULT_URL
