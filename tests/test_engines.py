"""Engines do exactly what they are told: in the predicted time, with exact books, and the model's own tokens."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine import Engine, EngineFacts, Load, Work
from services.worker.engines import draws
from services.worker.engines.sim import ALLOWANCE_S, SimEngine
from shared.columns import EMPTY, pack
from shared.perf.shape import BatchShape
from shared.schemas import Sampling, Selection
from shared.text import Tokenizer
from shared.vocabulary import Slot

SIM = EngineFacts("sim", "sim", "toy", 64, 16, 512, 16, 261, Tokenizer.builtin().eos_token_ids)
seeded = settings(deadline=None, print_blob=True, max_examples=100)


class Toy:
    """A profile that knows prefill from decode: 5 ms, 0.1 ms a chunk's token, 0.5 ms a decode, 1 us a cached token of one."""

    name = "toy"

    def batch_s(self, shape: BatchShape) -> float:
        return 5e-3 + 1e-4 * shape.prefill_tokens + 5e-4 * shape.decodes + 1e-6 * shape.decode_context

    def prefill_budget(self, shape: BatchShape, cached: int, budget_s: float, limit: int) -> int:
        return limit


class Machine:
    """A clock, and a sleep that wakes late."""

    def __init__(self, rng: Random) -> None:
        self.now_s, self._rng = 1000.0, rng

    def clock(self) -> float:
        return self.now_s

    def wait(self, duration_s: float) -> None:
        assert duration_s > 0
        self.now_s += duration_s + self._rng.choice([1e-4, 3e-4, 4e-3])


def sim(facts: EngineFacts = SIM, **options: Any) -> SimEngine:
    return SimEngine(facts, Toy(), **{"wait": None, "clock": time.monotonic, **options})


def load(engine: Engine, slot: int, tokens: Sequence[int], generated: int = 0, sampling: Sampling | None = None, seed: int = 1) -> None:
    engine.load(Load(Slot(slot), tokens, generated, sampling or Sampling(temperature=0.0), seed))


def run(engine: Engine, *work: tuple[int, int, bool]) -> list[list[int]]:
    return [list(done.tokens) for done in engine.execute([Work(Slot(slot), n, emits) for slot, n, emits in work], None).done]


# ---------------------------------------------------------------- sim


@seeded
@given(st.integers(0, 2**32))
def test_iterations_end_when_the_profile_says_however_late_python_is(seed: int) -> None:
    rng = Random(seed)
    machine = Machine(rng)
    engine = sim(wait=machine.wait, clock=machine.clock, pace=0.5)
    for slot in range(8):
        load(engine, slot, [1] * 20)
    began_s, predicted_s = machine.now_s, 0.0
    outcome = engine.execute([Work(Slot(slot), 20, True) for slot in range(8)], None)
    predicted_s += outcome.exec_s
    assert outcome.exec_s == pytest.approx(0.5 * (5e-3 + 1e-4 * 160))
    for _ in range(49):
        machine.now_s += rng.uniform(0.0, ALLOWANCE_S)  # speaking, logging, the next plan
        predicted_s += engine.execute([Work(Slot(slot), 1, True) for slot in range(8)], None).exec_s
    assert machine.now_s - began_s == pytest.approx(predicted_s, rel=0.02)


def test_a_plan_that_comes_late_is_not_forgiven() -> None:
    machine = Machine(Random(0))
    engine = sim(wait=machine.wait, clock=machine.clock)
    load(engine, 0, [1])
    engine.execute([Work(Slot(0), 1, True)], None)
    machine.now_s += 0.010
    handed_at_s = machine.now_s
    outcome = engine.execute([Work(Slot(0), 1, True)], None)
    assert machine.now_s - handed_at_s >= outcome.exec_s - 1e-9


def test_a_thread_that_was_stopped_catches_nothing_up() -> None:
    machine = Machine(Random(0))

    def stopped(duration_s: float) -> None:
        machine.now_s += duration_s + (5.0 if machine.now_s < 1001.0 else 0.0)

    engine = sim(wait=stopped, clock=machine.clock)
    load(engine, 0, [1])
    engine.execute([Work(Slot(0), 1, True)], None)
    handed_at_s = machine.now_s
    outcome = engine.execute([Work(Slot(0), 1, True)], None)
    assert machine.now_s - handed_at_s >= outcome.exec_s - 1e-9


def test_without_a_wait_nothing_reads_the_clock() -> None:
    def clock() -> float:
        raise AssertionError("read")

    engine = sim(clock=clock)
    load(engine, 0, [1, 2])
    assert engine.execute([Work(Slot(0), 2, True)], None).exec_s == pytest.approx(5.2e-3)


def test_the_profile_is_asked_for_the_batch_as_the_planner_sees_it() -> None:
    seen: list[BatchShape] = []

    class Recorder(Toy):
        def batch_s(self, shape: BatchShape) -> float:
            seen.append(shape)
            return 0.01

    engine = SimEngine(SIM, Recorder(), wait=None, clock=time.monotonic)
    load(engine, 0, [1] * 10)
    load(engine, 1, [1] * 40)
    run(engine, (0, 10, True), (1, 16, False))
    run(engine, (0, 1, True), (1, 24, True))
    assert seen[0] == BatchShape().with_chunk(10, 0).with_chunk(16, 0)
    assert seen[1] == BatchShape(decodes=1, decode_context=10).with_chunk(24, 16)


def play(engine: Engine, rng: Random, steps: int, tokens_of: Callable[[int], list[int]]) -> Iterator[dict[int, int]]:
    """Random loads, mixed batches, preemptions and releases. Yields the blocks each slot must hold (computed positions)."""
    facts = engine.facts
    known: dict[int, list[int]] = {}
    computed: dict[int, int] = {}

    def blocks(tokens: int) -> int:
        return -(-tokens // facts.block_tokens)

    for _ in range(steps):
        for slot in [s for s in known if rng.random() < 0.05]:
            engine.release(Slot(slot))
            if rng.random() < 0.5:
                load(engine, slot, known[slot])  # preempted: to be computed again
                computed[slot] = 0
            else:
                del known[slot], computed[slot]
        for slot in range(facts.max_slots):
            if slot not in known and rng.random() < 0.3:
                known[slot], computed[slot] = tokens_of(rng.randint(1, 60)), 0
                load(engine, slot, known[slot])
        free = facts.kv_blocks - sum(map(blocks, computed.values()))
        work = []
        for slot in rng.sample(sorted(known), len(known)):
            left = len(known[slot]) - computed[slot]
            n = rng.choice([left, rng.randint(1, left)])
            more = blocks(computed[slot] + n) - blocks(computed[slot])
            if more <= free and len(known[slot]) < facts.context_tokens and rng.random() < 0.8:
                free -= more
                work.append((slot, n, n == left))
        for (slot, n, _), tokens in zip(work, run(engine, *work), strict=True):
            computed[slot] += n
            known[slot] += tokens
        yield {slot: blocks(n) for slot, n in computed.items()}


@seeded
@given(st.integers(0, 2**32))
def test_kv_books_are_exact_under_any_load_execute_and_release(seed: int) -> None:
    engine = sim(SIM._replace(kv_blocks=24, max_slots=8))
    held: dict[int, int] = {}
    for held in play(engine, Random(seed), 40, lambda n: [1] * n):
        state = engine.snapshot()
        assert state.free_blocks == 24 - sum(held.values())
        assert set(state.slots) == set(held)
    for slot in held:
        engine.release(Slot(slot))
    assert engine.snapshot() == (24, [])


def test_misuse_is_a_bug_and_ends_the_process() -> None:
    def fresh() -> SimEngine:
        engine = sim(SIM._replace(kv_blocks=2))
        load(engine, 0, [1] * 20)
        return engine

    def overfill(engine: SimEngine) -> None:
        load(engine, 1, [1] * 20)
        run(engine, (0, 20, True), (1, 20, True))

    misuses: list[Callable[[SimEngine], object]] = [
        lambda engine: load(engine, 0, [1]),
        lambda engine: run(engine, (0, 21, True)),
        lambda engine: run(engine, (0, 20, False)),
        lambda engine: run(engine, (0, 5, True)),
        lambda engine: run(engine, (0, 0, False)),
        lambda engine: run(engine, (0, 5, False), (0, 5, False)),
        lambda engine: load(engine, 1, [1] * 513),
        overfill,
    ]
    for misuse in misuses:
        with pytest.raises(AssertionError):
            misuse(fresh())
    with pytest.raises(KeyError):
        fresh().release(Slot(1))


def test_output_is_readable_and_the_same_after_a_preemption() -> None:
    engine = sim()
    load(engine, 0, [1] * 9, seed=42)
    out = run(engine, (0, 9, True))[0]
    for _ in range(99):
        out += run(engine, (0, 1, True))[0]
    text = bytes(out).decode()
    print(text)
    words = text.split()
    assert all(word.isalpha() and word.islower() and len(word) <= 7 for word in words)
    assert len(set(words)) > 10
    engine.release(Slot(0))
    load(engine, 0, [1] * 9 + out[:50], generated=50, seed=42)
    again = run(engine, (0, 59, True))[0]
    for _ in range(49):
        again += run(engine, (0, 1, True))[0]
    assert out[50:] == again


@seeded
@given(st.integers(0, 2**32), st.integers(2, 6))
def test_accepted_drafts_change_the_pace_but_not_the_text_and_rejected_ones_hold_no_kv(seed: int, cap: int) -> None:
    plain, fast = sim(), sim()
    for engine in (plain, fast):
        load(engine, 0, [1] * 9, seed=seed)
    out = [run(engine, (0, 9, True))[0] for engine in (plain, fast)]
    for _ in range(60):
        out[0] += run(plain, (0, 1, True))[0]
    selection = Selection(method="chain", depth=pack([cap - 1]), width=pack([1]), needed=EMPTY.tobytes(), budget_tokens=cap)
    steps, verified = 0, 0
    while len(out[1]) <= 60 - cap:
        done = fast.execute([Work(Slot(0), cap, True)], selection).done[0]
        assert done.drafted == cap - 1
        assert 1 <= done.computed == len(done.tokens) <= cap
        out[1] += done.tokens
        steps, verified = steps + 1, verified + len(done.tokens)
        assert fast.snapshot().free_blocks == SIM.kv_blocks - -(-(9 + verified) // SIM.block_tokens)
    assert out[1] == out[0][: len(out[1])]
    assert verified > steps


def test_how_well_real_sleeps_keep_the_timeline() -> None:
    engine = sim(wait=time.sleep, pace=4.0)
    load(engine, 0, [1])
    engine.execute([Work(Slot(0), 1, True)], None)
    ends, predicted_s = [time.monotonic()], [0.0]
    for _ in range(50):
        predicted_s.append(predicted_s[-1] + engine.execute([Work(Slot(0), 1, True)], None).exec_s)
        ends.append(time.monotonic())
    late_s = [end - at for end, at in zip(ends, predicted_s, strict=True)]
    late_us = sorted((each - min(late_s)) * 1e6 for each in late_s)
    print(f"sim: 50 iterations of 22 ms, their ends late by p50 {late_us[25]:.0f} us, p98 {late_us[49]:.0f} us")


# ---------------------------------------------------------------- draws


def test_draws_are_even_and_apart() -> None:
    values = [draws.uniform(seed, n) for seed in (-3, 0, 1, 2**63) for n in range(2000)]
    assert len(set(values)) == len(values)
    assert all(0 <= value < 1 for value in values)
    counts = [sum(int(value * 10) == tenth for value in values) for tenth in range(10)]
    assert all(700 < count < 900 for count in counts)


# ---------------------------------------------------------------- torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    from services.worker.engines import random_llama

    return random_llama.make(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Callable[[list[int], int], tuple[list[int], list[float]]]:
    """transformers' own greedy generation: tokens, and by how much each beat the next best."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)

    def generate(prompt: list[int], n: int) -> tuple[list[int], list[float]]:
        out = model.generate(
            torch.tensor([prompt]), max_new_tokens=n, do_sample=False, eos_token_id=None, return_dict_in_generate=True, output_scores=True
        )
        best = [scores[0].topk(2).values for scores in out.scores]
        return out.sequences[0, len(prompt) :].tolist(), [float(two[0] - two[1]) for two in best]

    return generate


def test_greedy_tokens_are_transformers_own_for_any_chunks_and_mixes(folder: Path, reference: Any) -> None:
    from services.worker.engines.torch import TorchEngine

    engine = TorchEngine(folder, profile="toy", kv_blocks=96, block_tokens=8, max_slots=6)

    @settings(deadline=None, print_blob=True, max_examples=8)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        rng = Random(seed)
        asked = {slot: [rng.randrange(97, 123) for _ in range(rng.randint(1, 50))] for slot in range(6)}
        known = {slot: list(prompt) for slot, prompt in asked.items()}
        computed = dict.fromkeys(asked, 0)
        for slot, prompt in asked.items():
            load(engine, slot, prompt)
        while any(len(known[slot]) < len(asked[slot]) + 16 for slot in asked):
            work = []
            for slot in rng.sample(range(6), rng.randint(1, 6)):
                left = len(known[slot]) - computed[slot]
                n = rng.choice([left, rng.randint(1, left)])
                work.append((slot, n, n == left))
            for (slot, n, _), tokens in zip(work, run(engine, *work), strict=True):
                computed[slot] += n
                known[slot] += tokens
            if rng.random() < 0.1:  # preempt one: its KV is computed again
                slot = rng.randrange(6)
                engine.release(Slot(slot))
                load(engine, slot, known[slot], generated=len(known[slot]) - len(asked[slot]))
                computed[slot] = 0
            assert engine.snapshot().free_blocks == 96 - sum(-(-n // 8) for n in computed.values())
        for slot, prompt in asked.items():
            wanted, margins = reference(prompt, 16)
            got = known[slot][len(prompt) :][:16]
            sure = next((n for n, margin in enumerate(margins) if margin < 1e-4), 16)  # a tie may fall either way
            assert got[:sure] == wanted[:sure]
            engine.release(Slot(slot))
        assert engine.snapshot() == (96, [])

    check()


@pytest.mark.parametrize("family", ["Qwen3", "OPT", "GPTNeoX", "Gemma"])
def test_other_families_come_for_free(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    from services.worker.engines.torch import TorchEngine

    tiny_model(tmp_path, f"{family}Config")
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = [Random(3).randrange(256) for _ in range(40)]
    wanted = reference.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False, eos_token_id=None)[0, 40:].tolist()
    engine = TorchEngine(tmp_path, profile="toy", kv_blocks=32, block_tokens=8)
    for slot in (1, 2):
        load(engine, slot, prompt)
    run(engine, (1, 7, False), (2, 13, False))
    out = run(engine, (1, 33, True), (2, 27, True))
    while len(out[0]) < 10:
        out = [a + b for a, b in zip(out, run(engine, (1, 1, True), (2, 1, True)), strict=True)]
    assert out == [wanted, wanted]


def test_a_model_whose_attention_is_not_plain_is_refused_at_the_start(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from services.worker.engines.torch import TorchEngine
    from shared.errors import ConfigError

    tiny_model(tmp_path, "MistralConfig", sliding_window=64)
    with pytest.raises(ConfigError, match="sliding_window"):
        TorchEngine(tmp_path, profile="toy")


def tiny_model(folder: Path, kind: str, **options: Any) -> None:
    """Two layers of random weights, large enough that the next token is seldom a close call."""
    import torch
    import transformers

    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 261, "max_position_embeddings": 256}
    size |= {"word_embed_proj_dim": 64, "ffn_dim": 128} if kind == "OPTConfig" else {"intermediate_size": 128}
    size |= {"head_dim": 16, "num_key_value_heads": 2} if kind in ("Qwen3Config", "GemmaConfig", "MistralConfig") else {}
    config = getattr(transformers, kind)(**size, bos_token_id=256, eos_token_id=257, pad_token_id=258, **options)
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.15)
    model.save_pretrained(folder)
    Tokenizer.builtin().inner.save(str(folder / "tokenizer.json"))


def test_torch_books_are_exact_under_any_load_execute_and_release(folder: Path) -> None:
    from services.worker.engines.torch import TorchEngine

    engine = TorchEngine(folder, profile="toy", kv_blocks=20, block_tokens=8, max_slots=5)
    for held in play(engine, Random(5), 60, lambda n: [97] * n):
        assert engine.snapshot().free_blocks == 20 - sum(held.values())
    engine.close()
    assert engine.snapshot() == (20, [])


def test_a_sampled_request_goes_on_alike_after_it_is_computed_again_elsewhere(folder: Path) -> None:
    from services.worker.engines.torch import TorchEngine

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

    first = go_on(TorchEngine(folder, profile="toy"), prompt, 60, beside=False)
    second = go_on(TorchEngine(folder, profile="toy"), prompt + first[:25], 35, beside=True)
    assert first == first[:25] + second
    print(bytes(first).decode(errors="replace"))


def test_sampling_keeps_to_its_shares_and_bounds() -> None:
    torch = pytest.importorskip("torch")
    from services.worker.engines.sampling import Draw, choose

    shares = torch.tensor([0.5, 0.3, 0.15, 0.05])

    def counts(n: int, **how: Any) -> list[float]:
        sampling = Sampling(**how)
        chosen = choose(shares.log().expand(n, 4), [Draw(sampling, 3, position) for position in range(n)])
        return [chosen.count(token) / n for token in range(4)]

    assert counts(4000) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    assert counts(4000, top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert counts(4000, top_p=0.75) == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)
    assert counts(4000, temperature=0.5) == pytest.approx([0.685, 0.247, 0.062, 0.007], abs=0.03)
    assert counts(50, top_p=0.01) == [1, 0, 0, 0]
    assert counts(50, temperature=0.0) == [1, 0, 0, 0]
    assert counts(50, top_k=1) == [1, 0, 0, 0]


def test_the_random_model_is_made_once_and_speaks_words(folder: Path) -> None:
    from services.worker.engines import random_llama
    from services.worker.engines.torch import TorchEngine

    made = (folder / "model.safetensors").stat()
    random_llama.make(folder)
    assert (folder / "model.safetensors").stat().st_mtime_ns == made.st_mtime_ns
    assert not [path for path in folder.iterdir() if path.is_dir()]
    engine = TorchEngine(folder, profile="toy")
    prompt = Tokenizer.load(folder).encode("Tell me a story.")
    load(engine, 0, prompt, sampling=Sampling(temperature=1.0), seed=5)
    out = run(engine, (0, len(prompt), True))[0]
    for _ in range(150):
        out += run(engine, (0, 1, True))[0]
    assert set(out) <= {*b"abcdefghijklmnopqrstuvwxyz .", 257}
    assert engine.facts.eos_token_ids == {257, 260}


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from services.worker.engines.torch import TorchEngine
    from shared.errors import ConfigError

    with pytest.raises(ConfigError, match="no model"):
        TorchEngine(tmp_path, profile="toy")


def test_how_fast_the_torch_engine_is(folder: Path) -> None:
    from services.worker.engines.torch import TorchEngine

    engine = TorchEngine(folder, profile="toy")
    for batch in (1, 8):
        for slot in range(batch):
            load(engine, slot, [97] * 32)
        work = [(slot, 1, True) for slot in range(batch)]
        run(engine, *[(slot, 32, True) for slot in range(batch)])
        began_s = time.perf_counter()
        for _ in range(50):
            run(engine, *work)
        print(f"torch: batch {batch}, {50 * batch / (time.perf_counter() - began_s):.0f} tokens/s")
        for slot in range(batch):
            engine.release(Slot(slot))
