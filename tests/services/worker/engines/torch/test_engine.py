"""Tests of the torch engine: it makes the tokens of transformers' own `generate`, however requests
are batched and cut into chunks, and wherever their KV lies.

Longer: SLACKLINE_TORCH_EXAMPLES=1000 .venv/bin/python -m pytest
tests/services/worker/engines/torch/test_engine.py
"""

import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.core.worker.step import Load, Work
from shared.errors import ConfigError
from shared.schemas import Sampling
from shared.vocabulary import Slot

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from services.worker.engines.torch.engine import TorchEngine  # noqa: E402
from tests.rings import slow_but  # noqa: E402
from tests.services.worker.devices import device_of, needs_cuda  # noqa: E402
from tests.services.worker.engines.torch.one_by_one import one_by_one  # noqa: E402
from tests.services.worker.engines.torch.playing import play  # noqa: E402
from tests.services.worker.tiny_models import tiny_model  # noqa: E402

# of every family and way to compute
EXAMPLES = int(os.environ.get("SLACKLINE_TORCH_EXAMPLES", "8"))
seeded = settings(deadline=None, print_blob=True, max_examples=EXAMPLES)
GREEDY = Sampling(temperature=0.0)
OUTPUT, CLOSE = 12, 1e-4  # tokens generated; a lead of the likeliest token that rounding may turn
OTHERS = ("Qwen2", "Qwen3", "OPT")


class Expected(NamedTuple):
    """The output of `generate` for a prompt; `leads`: by how much each token beat the next likely
    one.
    """

    tokens: list[int]
    leads: list[float]
    logprobs: Any  # [OUTPUT, vocabulary]

    @property
    def sure(self) -> int:
        """The number of tokens before the first that rounding may turn."""
        return next((n for n, lead in enumerate(self.leads) if lead < CLOSE), len(self.tokens))


class Bank(NamedTuple):
    """Prompts of one model and the outputs that they must have."""

    folder: Path
    prompts: list[list[int]]
    expected: list[Expected]


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bank]:
    @cache
    def make(family: str) -> Bank:
        folder = tiny_model(tmp_path_factory.mktemp(family), family)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        rng = Random(7)
        prompts = [
            [rng.randrange(256) for _ in range(n)]
            for n in (1, 2, 3, 7, 8, 9, 16, 17, 23, 31, 40, 55)
        ]
        return Bank(folder, prompts, [generate(model, prompt) for prompt in prompts])

    return make


def generate(model: Any, prompt: list[int]) -> Expected:
    out = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=OUTPUT,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.cat(out.logits)
    best = logits.topk(2).values
    return Expected(
        out.sequences[0, len(prompt) :].tolist(),
        (best[:, 0] - best[:, 1]).tolist(),
        logits.log_softmax(-1),
    )


def load(
    engine: TorchEngine,
    slot: int,
    tokens: Sequence[int],
    generated: int = 0,
    sampling: Sampling = GREEDY,
    seed: int = 1,
) -> None:
    engine.load(Load(Slot(slot), tokens, generated, sampling, seed))


def run(engine: TorchEngine, *work: tuple[int, int, bool]) -> list[list[int]]:
    return [
        list(done.tokens)
        for done in engine.execute(
            [Work(Slot(slot), n, emits) for slot, n, emits in work], None
        ).done
    ]


def engine_on(way: str, folder: Path, *, kv_blocks: int, slots: int) -> TorchEngine:
    return TorchEngine(
        folder,
        profile="toy",
        kv_blocks=kv_blocks,
        block_tokens=4,
        max_slots=slots,
        device=device_of(way),
        dtype="float32",
    )


@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("Llama", "as it comes"),
        ("Llama", "without sparse kernels"),
        ("Llama", "gathered"),
        ("Llama", "packed"),
        ("Llama", "padded"),
        pytest.param("Llama", "on CUDA", marks=needs_cuda),
        *(pytest.param(other, "as it comes", marks=pytest.mark.slow) for other in OTHERS),
    ],
)
def test_greedy_tokens_are_those_of_generate(
    family: str, way: str, bank: Callable[[str], Bank]
) -> None:
    folder, prompts, expected = bank(family)
    engine = engine_on(way, folder, kv_blocks=30, slots=6)
    assert engine._model.is_flat
    assert engine._model._in_place == (way != "on CUDA")
    # what other builds and devices compute with
    engine._model._sparse &= way != "without sparse kernels"
    engine._model._in_place &= way not in ("gathered", "packed")
    if way == "packed":
        engine._model._kernel = one_by_one
    if way == "padded":
        engine._model._pad()

    @seeded
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        rng = Random(seed)
        asked = [rng.choice([None, 0, 1, 5]) for _ in prompts]
        for said in play(
            engine,
            rng,
            prompts,
            lambda n: Sampling(temperature=0.0, logprobs=asked[n]),
            slots=6,
            output=OUTPUT,
        ):
            want, top = expected[said.request], asked[said.request]
            sure = want.sure
            assert said.tokens[:sure] == want.tokens[:sure]
            assert len(said.logprobs) == (0 if top is None else OUTPUT)
            for n, likely in enumerate(said.logprobs[:sure]):
                known = want.logprobs[n]
                assert likely.logprob == pytest.approx(float(known[said.tokens[n]]), abs=1e-4)
                assert [value for _, value in likely.top] == pytest.approx(
                    known.topk(top).values.tolist(), abs=1e-4
                )
                assert [float(known[token]) for token, _ in likely.top] == pytest.approx(
                    [value for _, value in likely.top], abs=1e-4
                )

    check()
    calls = [lead for want in expected for lead in want.leads]
    assert sum(lead < CLOSE for lead in calls) <= 0.01 * len(calls)


@needs_cuda
def test_an_iteration_has_ended_when_it_says_so(tmp_path: Path) -> None:
    """Also one that makes no token, so that nothing of it is read."""
    engine = TorchEngine(tiny_model(tmp_path, "Llama"), profile="toy", kv_blocks=64)
    load(engine, 1, [*range(3, 203)])
    for _ in range(3):
        run(engine, (1, 60, False))
        assert torch.cuda.current_stream().query()


ASKED = (
    GREEDY,
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=1.3, top_k=5),
    Sampling(temperature=0.9, top_k=100, top_p=0.5, logprobs=2),
    Sampling(temperature=2.0, top_p=0.999),
)


@pytest.mark.parametrize("way", ["as it comes", pytest.param("on CUDA", marks=needs_cuda)])
def test_sampled_tokens_depend_neither_on_the_batch_nor_on_the_chunks(
    way: str, bank: Callable[[str], Bank]
) -> None:
    folder, prompts, _ = bank("Llama")
    engine = engine_on(way, folder, kv_blocks=40, slots=8)

    def asked(n: int) -> Sampling:
        return ASKED[n % len(ASKED)]

    alone = {}
    for n, prompt in enumerate(prompts):
        load(engine, 0, prompt, sampling=asked(n), seed=n)
        alone[n] = run(engine, (0, len(prompt), True))[0]
        while len(alone[n]) < OUTPUT:
            alone[n] += run(engine, (0, 1, True))[0]
        engine.release(Slot(0))

    @seeded
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        assert {
            said.request: said.tokens
            for said in play(engine, Random(seed), prompts, asked, slots=8, output=OUTPUT)
        } == alone

    check()


@pytest.mark.parametrize(
    "family", slow_but(["Gemma", "GPTNeoX"], ["GPTNeoX", "Gemma", "Mistral", "Phi3", "Olmo2"])
)
def test_other_families_come_for_free(family: str, tmp_path: Path) -> None:
    engine = TorchEngine(
        tiny_model(tmp_path, family), profile="toy", device="cpu", kv_blocks=32, block_tokens=8
    )
    want = generate(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32),
        [*range(3, 43)],
    )
    for slot in (1, 2):
        load(engine, slot, [*range(3, 43)])
    run(engine, (1, 7, False), (2, 13, False))
    out = run(engine, (1, 33, True), (2, 27, True))
    while len(out[0]) < want.sure:
        out = [a + b for a, b in zip(out, run(engine, (1, 1, True), (2, 1, True)), strict=True)]
    assert out == [want.tokens[: want.sure]] * 2


@pytest.mark.parametrize(
    ("family", "options", "why"),
    [
        ("Mistral", {"sliding_window": 64}, "sliding_window"),
        ("Gemma2", {}, "softcap"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "longest of a batch",
        ),
        ("Mamba", {}, "layers this engine cannot compute: linear_attention"),
        ("Bloom", {}, "cannot be replaced"),
        ("GptOss", {"num_local_experts": 4}, "s_aux"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_at_the_start(
    family: str, options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=why):
        TorchEngine(tiny_model(tmp_path, family, **options), profile="toy", device="cpu")


def test_a_window_that_holds_the_whole_context_is_no_window(tmp_path: Path) -> None:
    tiny_model(tmp_path, "Mistral", sliding_window=256)
    assert TorchEngine(tmp_path, profile="toy", device="cpu").facts.context_tokens == 256


@pytest.mark.parametrize("how", ["fails", "errs"])
def test_a_model_that_cannot_be_flattened_is_served_as_it_is(
    how: str, monkeypatch: pytest.MonkeyPatch, bank: Callable[[str], Bank]
) -> None:
    from services.worker.engines.torch.attention import flat

    def flatten(*_: object) -> Any:
        if how == "fails":
            raise RuntimeError("control flow that depends on data")
        return lambda ids, positions, rows: torch.zeros(1, len(rows), 261)

    monkeypatch.setattr(flat, "flatten", flatten)
    folder, prompts, expected = bank("Qwen3")
    engine = TorchEngine(folder, profile="toy", device="cpu", kv_blocks=40, block_tokens=4)
    assert not engine._model.is_flat
    for said in play(engine, Random(1), prompts, lambda _: GREEDY, slots=4, output=OUTPUT):
        sure = expected[said.request].sure
        assert said.tokens[:sure] == expected[said.request].tokens[:sure]


def test_bfloat16_is_an_option(bank: Callable[[str], Bank]) -> None:
    folder, prompts, expected = bank("Llama")
    engine = TorchEngine(
        folder, profile="toy", device="cpu", kv_blocks=40, block_tokens=4, dtype="bfloat16"
    )
    agree = [
        said.tokens[0] == expected[said.request].tokens[0]
        for said in play(engine, Random(1), prompts, lambda _: GREEDY, slots=4, output=OUTPUT)
    ]
    assert sum(agree) > len(agree) / 2
    with pytest.raises(ConfigError, match="float16"):
        TorchEngine(folder, profile="toy", device="cpu", dtype="float16")


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model"):
        TorchEngine(tmp_path, profile="toy", device="cpu")
