"""Tests of `slackline up`: it refuses wrong options and configurations before anything starts."""

import argparse
from pathlib import Path

import pytest

from loadgen.cli import up
from loadgen.cli.main import main
from loadgen.fleet.fleet import FleetSpec, model_of
from shared.errors import ConfigError


def spec_of(*words: str) -> FleetSpec:
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    return up.make_spec(parser.parse_args(words))


@pytest.mark.parametrize("option", ["--port", "--http-port"])
@pytest.mark.parametrize("port", ["99999", "-1"])
def test_a_number_that_is_no_port_is_told_as_that(option: str, port: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{option} {port}: .* 0 to 65535") as refused:
        spec_of("--engine", "sim", option, port)
    assert "not free" not in str(refused.value)


def test_a_number_that_is_no_port_of_metrics_is_told_with_where_it_was_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "--metrics-port", "99999"]) == 2
    monkeypatch.setenv("SLACKLINE_METRICS_PORT", "many")
    assert main(["up"]) == 2
    allowed = "a port is 0 to 65535, and 0 takes any free one"
    assert capsys.readouterr().err.splitlines() == [
        f"slackline up: --metrics-port 99999: {allowed}",
        f"slackline up: SLACKLINE_METRICS_PORT many: {allowed}",
    ]


def test_a_wrong_configuration_is_refused_with_the_command_that_tells_all_of_it(
    tmp_path: Path,
) -> None:
    file = tmp_path / "slackline.toml"
    file.write_text("colour = 'red'\n[tenants.acme]\nweight = 0\n")
    with pytest.raises(ConfigError, match="colour") as refused:
        spec_of("--engine", "sim", "--config", str(file))
    assert str(refused.value).endswith(f"; `slackline config check {file}` tells all that is wrong")


def test_several_models_run_in_one_fleet_under_the_names_that_they_are_given() -> None:
    real = spec_of("--model", "slackline-5m", "--model", "terse=slackline-draft")
    assert real.models == {"slackline-5m": "slackline-5m", "terse": "slackline-draft"}
    sim = spec_of(
        "--engine",
        "sim",
        "--replicas",
        "2",
        "--model",
        "a=a100-qwen-14b",
        "--model",
        "b=h100-llama3-8b",
    )
    assert (sim.models, sim.workers) == ({"a": "a100-qwen-14b", "b": "h100-llama3-8b"}, 4)
    assert [model_of(sim, n)["SLACKLINE_WORKER_MODEL"] for n in range(4)] == ["a", "a", "b", "b"]
    one = spec_of("--model", "slackline-draft")
    assert (one.model, one.models, model_of(one, 0)) == ("slackline-draft", {}, {})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--engine", "sim", "--model", "a=no-such"), "no-such"),
        (("--model", "a=slackline-5m", "--model", "a=slackline-draft"), "two models a"),
        (
            ("--model", "a=slackline-5m", "--model", "slackline-draft", "--draft-model", "none"),
            "one model",
        ),
    ],
)
def test_models_that_cannot_be_served_together_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        spec_of(*words)


@pytest.mark.parametrize(
    ("option", "engine"), [("--model", "torch"), ("--model", "vllm"), ("--draft-model", "torch")]
)
def test_a_folder_that_is_no_model_is_refused(option: str, engine: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^{option} {tmp_path}: .*config\.json"):
        spec_of("--engine", engine, option, str(tmp_path))
