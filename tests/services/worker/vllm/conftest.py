"""Fixtures for the vLLM tests: vLLM engines, and what vLLM answers under its own scheduler."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from services.worker.config import WorkerConfig
from shared.text.tokenizer import Tokenizer
from tests.services.worker.vllm.adapter import write_adapter

OURS = Path(__file__).parents[4] / "shared" / "models" / "slackline-5m"
DRAFT = OURS.parent / "slackline-draft"
KV_BLOCKS, SLOTS = 24, 12  # a quarter of what the requests want: plans run out of KV
OUTPUT_TOKENS = 30
# a token counts as greedy if the next best is so much less likely (natural log): another batch must
# not turn it
FIRM = 1e-3
SENTENCES = (
    "What is the capital of France?",
    "Tell me about a dog that lives in a house and likes to eat.",
    "A list of animals: cat, dog, horse, cat, dog, horse,",
    "How do plants grow?",
    "Once there was a small boat on a river. It",
    "Why is the sky blue?",
)


BUILT: list[Any] = []


class Case(NamedTuple):
    """The prompts for a model, and the answers under vLLM's own scheduler, with the logprobs of the
    three likeliest tokens.
    """

    prompts: list[list[int]]
    outputs: list[list[int]]
    logprobs: list[list[dict[int, float]]]
    others: list[list[int]]  # the outputs under the adapter
    firm: list[int]  # of which prompts both outputs are
    llm: Any


@pytest.fixture(scope="session", autouse=True)
def environment() -> None:
    """Set the environment for vLLM's own scheduler, which does not go through `build`."""
    from services.worker.engines.vllm.setup import CPU_ENVIRONMENT, ENVIRONMENT

    for name, value in {**ENVIRONMENT, **CPU_ENVIRONMENT, "HF_HUB_OFFLINE": "1"}.items():
        os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small Llama with random weights."""
    from tests.services.worker import random_llama

    return random_llama.make(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory, small: Path) -> dict[str, Path]:
    """A folder for each model, by the model's name."""
    return {
        name: write_adapter(tmp_path_factory.mktemp("adapter"), model, seed=3)
        for name, model in (("ours", OURS), ("small", small))
    }


@pytest.fixture(scope="session")
def case(small: Path, adapters: dict[str, Path]) -> Callable[[str], Case]:
    """A case by the model's name: ours or small."""
    made: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in made:
            made[name] = _reference(OURS if name == "ours" else small, adapters[name])
        return made[name]

    return get


def _reference(folder: Path, adapter: Path) -> Case:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    tokenizer, rng = Tokenizer.load(folder), Random(5)
    prompts = [tokenizer.encode(sentence) for sentence in SENTENCES]
    prompts += [
        [rng.randrange(5, tokenizer.vocabulary) for _ in range(rng.randint(2, 150))]
        for _ in range(12)
    ]
    llm = LLM(
        model=str(folder), dtype="float32", enforce_eager=True, num_gpu_blocks_override=257,
        block_size=32, max_num_seqs=16,
        max_model_len=1024, enable_lora=True, max_lora_rank=8,
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=3)
    asked: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = [
        [
            answer.outputs[0]
            for answer in llm.generate(asked, params, use_tqdm=False, lora_request=lora)
        ]
        for lora in (None, LoRARequest("other", 1, str(adapter)))
    ]
    logprobs = [
        [
            [{token: likely.logprob for token, likely in step.items()} for step in answer.logprobs]
            for answer in each
        ]
        for each in answers
    ]
    firm = [n for n in range(len(prompts)) if all(_firm(each[n]) for each in logprobs)]
    assert len(firm) >= SLOTS, "hardly any output is firm: other prompts"
    tokens = [[list(answer.token_ids) for answer in each] for each in answers]
    return Case(prompts, tokens[0], logprobs[0], tokens[1], firm, llm)


def _firm(output: list[dict[int, float]]) -> bool:
    """Tells whether each token of the output beats the next best by more than FIRM."""
    return all(
        first - second > FIRM
        for first, second, *_ in (sorted(step.values(), reverse=True) for step in output)
    )


def built(folder: Path, vllm: dict[str, Any], **options: Any) -> Any:
    from services.worker.engines.vllm.setup import build

    cfg = WorkerConfig(
        engine="vllm",
        **{"kv_blocks": KV_BLOCKS, "max_slots": SLOTS, **options},
        vllm={"max_model_len": 512, **vllm},
    )
    BUILT.append(build(cfg, folder))
    return BUILT[-1]


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    """Release the requests that a test left loaded; no block is leaked."""
    yield
    for engine in BUILT:
        for slot in engine.snapshot().slots:
            engine.release(slot)
        assert engine.snapshot() == (engine.facts.kv_blocks, [], 0, 0), "blocks are leaked"


@pytest.fixture(scope="session")
def plain(small: Path) -> Iterator[Callable[[str], Any]]:
    """An engine without a prefix cache, by the model's name. Its count of KV blocks is exact."""
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            made[name] = built(OURS if name == "ours" else small, {"enable_prefix_caching": False})
        return made[name]

    yield get
    for engine in made.values():
        engine.close()


@pytest.fixture(scope="session")
def caching(adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Our model with a prefix cache, and with adapters."""
    third = write_adapter(tmp_path_factory.mktemp("adapter"), OURS, seed=4)
    engine = built(
        OURS, {"max_lora_rank": 8}, adapters={"other": str(adapters["ours"]), "third": str(third)}
    )
    yield engine
    engine.close()


SPECULATION = {"method": "draft_model", "model": str(DRAFT), "num_speculative_tokens": 4}


@pytest.fixture(scope="session")
def drafting() -> Iterator[Any]:
    """Our model with its small draft model, and without a prefix cache."""
    engine = built(
        OURS,
        {"speculative_config": SPECULATION, "enable_prefix_caching": False},
        kv_blocks=KV_BLOCKS + SLOTS,
    )
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def drafting_and_caching() -> Iterator[Any]:
    """Our model with its small draft model, and with a prefix cache."""
    engine = built(OURS, {"speculative_config": SPECULATION}, kv_blocks=KV_BLOCKS + SLOTS)
    yield engine
    engine.close()
