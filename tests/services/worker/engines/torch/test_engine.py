"""The torch engine makes the tokens of transformers' own `generate`, however requests are batched
and cut into chunks, and wherever their KV lies.

Longer: SLACKLINE_TORCH_EXAMPLES=1000 .venv/bin/python -m pytest
tests/services/worker/engines/torch/test_engine.py
"""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine import Likely
from shared.core.worker.step import Load, Work
from shared.errors import ConfigError
from shared.schemas import Sampling
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import Slot

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from services.worker.engines.torch.engine import TorchEngine  # noqa: E402
from services.worker.engines.torch.paged import Blocks, Place  # noqa: E402
from services.worker.engines.torch.sampling import Draw, choose, likelihoods  # noqa: E402
from tests.rings import slow_but  # noqa: E402
from tests.services.worker import random_llama  # noqa: E402
from tests.services.worker.devices import device_of, needs_cuda  # noqa: E402
from tests.services.worker.engines.torch.one_by_one import one_by_one  # noqa: E402
from tests.services.worker.tiny_models import tiny_model  # noqa: E402

# of every family and way to compute
EXAMPLES = int(os.environ.get("SLACKLINE_TORCH_EXAMPLES", "8"))
seeded = settings(deadline=None, print_blob=True, max_examples=EXAMPLES)
GREEDY = Sampling(temperature=0.0)
OUTPUT, CLOSE = 12, 1e-4  # tokens generated; a lead of the likeliest token that rounding may turn
FAMILIES = ("Llama", "Qwen2", "Qwen3", "OPT")


class Expected(NamedTuple):
    """The output of `generate` for a prompt; `leads`: by how much each token beat the next likely
    one.
    """

    tokens: list[int]
    leads: list[float]
    logprobs: Any  # [OUTPUT, vocabulary]

    @property
    def sure(self) -> int:
        """Tokens before the first close call."""
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


class Played(NamedTuple):
    """The output of one request of a play."""

    request: int
    tokens: list[int]
    logprobs: list[Likely]


def play(
    engine: TorchEngine,
    rng: Random,
    prompts: Sequence[Sequence[int]],
    sampling: Callable[[int], Sampling],
    slots: int,
) -> Iterator[Played]:
    """Play every prompt until it has OUTPUT tokens, with random chunks, mixes, orders, preemptions
    and pauses, and check the books throughout.
    """
    facts = engine.facts

    def blocks(tokens: int) -> int:
        return -(-tokens // facts.block_tokens)

    waiting = list(enumerate(prompts))
    rng.shuffle(waiting)
    request: dict[int, int] = {}
    known: dict[int, list[int]] = {}
    computed: dict[int, int] = {}
    likely: dict[int, list[Likely]] = {}
    free = facts.kv_blocks
    while waiting or known:
        for slot in range(slots):
            if slot not in known and waiting and rng.random() < 0.5:
                request[slot], prompt = waiting.pop()
                known[slot], computed[slot], likely[slot] = list(prompt), 0, []
                load(engine, slot, prompt, sampling=sampling(request[slot]), seed=request[slot])
        work, room = [], free
        for slot in rng.sample(sorted(known), len(known)):
            left = len(known[slot]) - computed[slot]
            n = rng.choice([left, left, rng.randint(1, left)])
            more = blocks(computed[slot] + n) - blocks(computed[slot])
            if more <= room and rng.random() < 0.85:
                room -= more
                work.append(Work(Slot(slot), n, n == left))
        done = engine.execute(work, None).done if work else []
        for entry, did in zip(work, done, strict=True):
            slot, n = entry.slot, entry.tokens
            left = len(known[slot]) - computed[slot]
            assert did.computed == did.cached + min(n, left - did.cached)
            free -= blocks(computed[slot] + did.computed) - blocks(computed[slot])
            computed[slot] += did.computed
            known[slot] += did.tokens
            likely[slot] += did.logprobs
        for slot in list(known):
            prompt = prompts[request[slot]]
            made = len(known[slot]) - len(prompt)
            if made >= OUTPUT:
                yield Played(request[slot], known[slot][len(prompt) :], likely[slot])
            elif not (rng.random() < 0.05 or (not work and rng.random() < 0.5)):
                continue
            # over, or preempted: computed again, from its prompt and what it has said
            engine.release(Slot(slot))
            free += blocks(computed[slot])
            if made >= OUTPUT:
                del known[slot], computed[slot]
            else:
                computed[slot] = 0
                load(
                    engine,
                    slot,
                    known[slot],
                    generated=made,
                    sampling=sampling(request[slot]),
                    seed=request[slot],
                )
        assert (
            engine.snapshot().free_blocks
            == free
            == facts.kv_blocks - sum(blocks(n) for n in computed.values())
        )
        assert set(engine.snapshot().slots) == set(known)
        engine.check()
    assert engine.snapshot() == (facts.kv_blocks, [], 0, 0)


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
    "way",
    [
        "as it comes",
        "without sparse kernels",
        "gathered",
        "packed",
        "padded",
        pytest.param("on CUDA", marks=needs_cuda),
    ],
)
@pytest.mark.parametrize("family", slow_but(["Llama"], FAMILIES))
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
            engine, rng, prompts, lambda n: Sampling(temperature=0.0, logprobs=asked[n]), slots=6
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
            for said in play(engine, Random(seed), prompts, asked, slots=8)
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
    for said in play(engine, Random(1), prompts, lambda _: GREEDY, slots=4):
        sure = expected[said.request].sure
        assert said.tokens[:sure] == expected[said.request].tokens[:sure]


def test_bfloat16_is_an_option(bank: Callable[[str], Bank]) -> None:
    folder, prompts, expected = bank("Llama")
    engine = TorchEngine(
        folder, profile="toy", device="cpu", kv_blocks=40, block_tokens=4, dtype="bfloat16"
    )
    agree = [
        said.tokens[0] == expected[said.request].tokens[0]
        for said in play(engine, Random(1), prompts, lambda _: GREEDY, slots=4)
    ]
    assert sum(agree) > len(agree) / 2
    with pytest.raises(ConfigError, match="float16"):
        TorchEngine(folder, profile="toy", device="cpu", dtype="float16")


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model"):
        TorchEngine(tmp_path, profile="toy", device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama.make(tmp_path_factory.mktemp("model") / "llama")


def test_a_sampled_request_goes_on_alike_after_it_is_computed_again_elsewhere(folder: Path) -> None:
    prompt = Tokenizer.builtin().encode("once upon a time")
    sampling = Sampling(temperature=0.9, top_p=0.95, top_k=20)

    def go_on(engine: TorchEngine, tokens: list[int], n: int, beside: bool) -> list[int]:
        load(engine, 0, tokens, generated=len(tokens) - len(prompt), sampling=sampling, seed=11)
        if beside:
            load(engine, 1, prompt, sampling=Sampling(temperature=1.3), seed=12)
            run(engine, (1, len(prompt), True))
        out = run(engine, (0, len(tokens), True))[0]
        while len(out) < n:
            out += run(engine, *[(slot, 1, True) for slot in range(1 + beside)])[0]
        return out

    first = go_on(TorchEngine(folder, profile="toy", device="cpu"), prompt, 60, beside=False)
    second = go_on(
        TorchEngine(folder, profile="toy", device="cpu"), prompt + first[:25], 35, beside=True
    )
    assert first == first[:25] + second
    print(bytes(first).decode(errors="replace"))


def test_sampling_keeps_to_its_shares_and_bounds() -> None:
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05])

    def counts(n: int, **how: Any) -> list[float]:
        sampling = Sampling(**how)
        chosen = choose(
            shares.log().expand(n, 4), [Draw(sampling, 3, position) for position in range(n)]
        )
        return [chosen.count(token) / n for token in range(4)]

    assert counts(4000) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    assert counts(4000, top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert counts(4000, top_p=0.75) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert counts(4000, temperature=0.5) == pytest.approx([0.685, 0.247, 0.062, 0.007], abs=0.03)
    assert counts(50, top_p=0.01) == [1, 0, 0, 0]
    assert counts(50, temperature=0.0) == [1, 0, 0, 0]
    assert counts(50, top_k=1) == [1, 0, 0, 0]


def test_the_random_model_is_made_once_and_speaks_words(folder: Path) -> None:
    made = (folder / "model.safetensors").stat()
    random_llama.make(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == made.st_mtime_ns
    assert not [path for path in folder.iterdir() if path.is_dir()]
    engine = TorchEngine(folder, profile="toy", device="cpu")
    prompt = Tokenizer.load(folder).encode("Tell me a story.")
    load(engine, 0, prompt, sampling=Sampling(temperature=1.0), seed=5)
    out = run(engine, (0, len(prompt), True))[0]
    for _ in range(150):
        out += run(engine, (0, 1, True))[0]
    assert set(out) <= {*b"abcdefghijklmnopqrstuvwxyz .", 257}
    assert engine.facts.eos_token_ids == {257, 260}


# ---------------------------------------------------------------- where KV lies


@seeded
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 5))
def test_a_sequence_grows_while_a_block_is_free_and_no_position_is_anothers(
    seed: int, total: int, block_tokens: int
) -> None:
    rng = Random(seed)
    blocks = Blocks(total, block_tokens)
    held: dict[int, tuple[Place, int]] = {}
    for step in range(100):
        place, tokens = held.pop(rng.randrange(6), (Place(block_tokens, rng.randint(0, 100)), 0))
        if tokens and rng.random() < 0.3:
            blocks.release(place)
        else:
            room = blocks.free * block_tokens + -tokens % block_tokens
            tokens += rng.randint(0, room)
            blocks.grow(place, tokens)
            held[step] = (place, tokens)
            held = dict(enumerate(held.values()))
        assert blocks.free == total - sum(-(-tokens // block_tokens) for _, tokens in held.values())
        every = [
            position
            for place, tokens in held.values()
            for position in place.positions(0, tokens).tolist()
        ]
        assert len(set(every)) == len(every)
        assert set(every) <= set(range(total * block_tokens))
        for place, tokens in held.values():
            first = rng.randint(0, tokens)
            stretches = place.within(first, tokens)
            assert [
                position for begin, end in stretches for position in range(begin, end)
            ] == place.positions(first, tokens).tolist()


def test_sequences_that_grow_side_by_side_lie_in_one_stretch_each() -> None:
    blocks = Blocks(256, 16)
    places = [Place(16, 500) for _ in range(6)]
    for tokens in (64, 128, 500):
        for place in places:
            blocks.grow(place, tokens)
    assert [len(place.within(0, 500)) for place in places] == [1] * 6


# ---------------------------------------------------------------- sampling


def plainly(logits: Any, sampling: Sampling) -> Any:
    """The shares of all tokens after temperature, top-k and top-p, by the definition."""
    ordered, order = (logits.double() / sampling.temperature).sort(descending=True, stable=True)
    ordered[sampling.top_k or len(ordered) :] = -torch.inf
    shares = ordered.softmax(-1)
    shares[1:][(shares.cumsum(-1) - shares)[1:] >= sampling.top_p] = 0.0
    return torch.zeros_like(shares).scatter(0, order, shares / shares.sum())


@seeded
@given(
    st.integers(0, 2**32),
    st.sampled_from([3, 50, 261, 2048, 5000]),
    st.floats(0.1, 2.0),
    st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    st.one_of(st.just(0), st.integers(1, 6000)),
)
def test_draws_have_the_shares_of_the_definition(
    seed: int, vocabulary: int, temperature: float, top_p: float, top_k: int
) -> None:
    """The cut may be sharp or the tail flat; n draws at even points of [0, 1) would have counts of
    n times the share.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = (
        torch.randn(vocabulary, generator=generator) * float(torch.rand(1, generator=generator)) * 6
    )
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    shares = plainly(logits, sampling)
    n = 4000
    chosen = torch.tensor(
        choose(logits.expand(n, -1), [Draw(sampling, seed, position) for position in range(n)])
    ).bincount(minlength=vocabulary)
    assert (chosen[shares == 0] > 0).sum() <= 1, (
        "a cut token was drawn (one may be at the cut, where rounding decides)"
    )
    likely = shares.topk(min(20, vocabulary)).indices
    for expected, got in zip((shares[likely] * n).tolist(), chosen[likely].tolist(), strict=True):
        assert abs(got - expected) <= 6 * max(expected, 1.0) ** 0.5 + 3


def test_likelihoods_are_of_the_raw_logits() -> None:
    shares = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]])
    first, second = likelihoods((shares * 3).log(), [1, 0], [0, 3])
    assert first.logprob == pytest.approx(torch.tensor(0.3).log().item())
    assert first.top == ()
    assert second.logprob == pytest.approx(torch.tensor(0.1).log().item())
    assert [token for token, _ in second.top] == [3, 2, 1]
    assert [value for _, value in second.top] == pytest.approx(
        torch.tensor([0.4, 0.3, 0.2]).log().tolist()
    )
