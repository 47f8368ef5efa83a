"""Tests of `slackline up --engine vllm`: it passes vLLM's arguments on, and refuses wrong ones."""

import argparse
from collections.abc import Sequence

import pytest

from loadgen.cli import up
from loadgen.fleet.fleet import FleetSpec
from loadgen.fleet.gpus import devices
from services.worker.config import WorkerConfig
from services.worker.engines.make import make
from shared.errors import ConfigError


def spec_of(*words: str) -> FleetSpec:
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    return up.make_spec(parser.parse_args(words))


def test_arguments_of_vllm_are_json_or_plain_words() -> None:
    spec = spec_of(
        *("--engine", "vllm"),
        *("--vllm", "tensor_parallel_size=2"),
        *("--vllm", "quantization=fp8"),
        *("--vllm", "enforce_eager=true"),
        *("--vllm", 'speculative_config={"method": "ngram"}'),
        *("--adapter", "legal=/srv/legal"),
    )
    assert spec.vllm == {
        "tensor_parallel_size": 2,
        "quantization": "fp8",
        "speculative_config": {"method": "ngram"},
        "enforce_eager": True,
    }
    assert spec.adapters == {"legal": "/srv/legal"}
    assert spec.replicas == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--engine", "sim", "--vllm", "a=1"), "--engine vllm"),
        (("--adapter", "a=/b"), "--engine vllm"),
        (("--engine", "vllm", "--vllm", "enforce_eager"), "KEY=VALUE"),
        (("--engine", "vllm", "--model", "no-such-model"), "no model named"),
        (("--engine", "sim", "--model", "slackline-5m"), "--engine torch, or vllm"),
        (("--engine", "sim", "--replicas", "0"), "at least one replica"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_word_about_what_would(
    words: Sequence[str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        spec_of(*words)


def test_without_vllm_its_engine_is_refused_with_the_range_of_versions() -> None:
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match=r"0\.27.*0\.33.*docs/run-on-my-gpu\.md"):
        make(WorkerConfig(engine="vllm"))


def test_each_of_several_workers_has_gpus_of_its_own() -> None:
    spec = FleetSpec(engine="vllm", replicas=2, vllm={"tensor_parallel_size": 2})
    assert [devices(spec, n, {}) for n in (0, 1)] == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]
    assert devices(spec, 1, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}) == {"CUDA_VISIBLE_DEVICES": "6,7"}
    with pytest.raises(ConfigError, match="need 4, and there are 2"):
        devices(spec, 0, {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert devices(FleetSpec(engine="vllm", replicas=1), 0, {}) == {}
    assert devices(FleetSpec(engine="sim", replicas=2), 1, {}) == {}


def test_replicas_of_the_torch_engine_have_a_gpu_each_or_share_by_a_stated_part() -> None:
    spec, two = FleetSpec(engine="torch", replicas=2), {"CUDA_VISIBLE_DEVICES": "3,5"}
    assert [devices(spec, n, two)["CUDA_VISIBLE_DEVICES"] for n in (0, 1)] == ["3", "5"]
    for none in ("", "-1"):  # on the CPU
        assert devices(spec, 1, {"CUDA_VISIBLE_DEVICES": none}) == {}
    one = {"CUDA_VISIBLE_DEVICES": "3"}
    with pytest.raises(ConfigError, match=r"there is 1; .* SLACKLINE_WORKER_KV_BLOCKS"):
        devices(spec, 0, one)
    shared = one | {"SLACKLINE_WORKER_KV_BLOCKS": "2048"}
    assert [devices(spec, n, shared) for n in (0, 1)] == [one, one]
