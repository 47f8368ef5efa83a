"""The torch engine and the simulated one keep the same books of prefixes: what a request finds,
what is free, what is shared, which prefix gives way, and what of a text may come from elsewhere.
"""

from pathlib import Path
from random import Random

import pytest

from services.worker.engines.sim.engine import SimEngine
from shared.core.worker.step import Load, Work
from shared.perf import profile_file
from shared.prefix import CHAIN_TOKENS
from shared.schemas import Sampling
from shared.vocabulary import Slot
from tests import made

torch = pytest.importorskip("torch")

from services.worker.engines.torch.engine import TorchEngine  # noqa: E402
from tests.services.worker.tiny_models import tiny_model  # noqa: E402

KV_BLOCKS, CONTEXT_TOKENS, SLOTS = 13, 768, 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny_model(folder, "Llama", max_position_embeddings=CONTEXT_TOKENS)


def prompt(rng: Random, number: int) -> list[int]:
    """A prompt that begins like others, with an end of its own."""
    begin = Random(rng.randint(1, 3)).choices(range(256), k=rng.randint(0, 400))
    return begin + Random(f"own {number}").choices(range(256), k=rng.randint(1, 90))


def bring_in(rng: Random, real: TorchEngine, sim: SimEngine, text: list[int]) -> int:
    """Bring some of what both lack of this text into both. Returns the number of blocks."""
    wanted, same = (engine.lacking(text, b"") for engine in (real, sim))
    assert (wanted.tokens, [name.mark for name in wanted.names]) == (
        same.tokens,
        [int.from_bytes(name.digest, "little") for name in same.names],
    )
    assert real.facts.kv is not None
    most = rng.randint(0, len(wanted.names))
    payloads = [memoryview(bytes(real.facts.kv.block_bytes))] * most
    there = real.bring_in(wanted.names[:most], payloads)
    assert there == sim.bring_in(same.names[:most], payloads) == [True] * most
    return most


@pytest.mark.parametrize(("seed", "host_blocks"), [(0, 0), (1, 0), (2, 3), (3, 8), (4, 40)])
def test_both_find_the_same_and_evict_the_same(model: Path, seed: int, host_blocks: int) -> None:
    rng = Random(seed)
    real = TorchEngine(
        model,
        profile="toy",
        device="cpu",
        kv_blocks=KV_BLOCKS,
        block_tokens=CHAIN_TOKENS,
        host_kv_tokens=host_blocks * CHAIN_TOKENS,
    )
    assert (real.facts.kv_load_s > 0) == (host_blocks > 0)
    facts = made.engine_facts(
        kv_blocks=KV_BLOCKS,
        host_kv_blocks=host_blocks,
        kv_load_s=1.0,
        block_tokens=CHAIN_TOKENS,
        context_tokens=CONTEXT_TOKENS,
        vocabulary=real.facts.vocabulary,
    )
    profile = profile_file.load(facts.profile)
    sim = SimEngine(facts, profile, wait=None, clock=lambda: 0.0, prefix_caching=True)
    left: dict[int, int] = {}  # by slot, the tokens to compute before the next
    known: dict[int, int] = {}
    cached = lapsed = evicted = loads = brought = 0
    for step in range(120):
        for slot in range(SLOTS):
            if slot not in left and rng.random() < 0.4:
                tokens = prompt(rng, SLOTS * step + slot)
                load = Load(
                    Slot(slot),
                    tokens,
                    0,
                    Sampling(temperature=0.0, ignore_eos=True),
                    step,
                    keep_s=rng.choice([0.0, 0.0, 512.0]),  # longer than the test takes
                )
                real.load(load)
                sim.load(load)
                left[slot] = known[slot] = len(tokens)
            elif slot in left and rng.random() < 0.08:
                real.release(Slot(slot))
                sim.release(Slot(slot))
                del left[slot], known[slot]
            elif slot in left and rng.random() < 0.04:
                real.preempt(Slot(slot))
                sim.preempt(Slot(slot))
                left[slot] = known[slot]
        if rng.random() < 0.3:
            brought += bring_in(rng, real, sim, prompt(rng, rng.randrange(SLOTS * (step + 1))))
        work = []
        for slot in rng.sample(sorted(left), rng.randint(0, len(left))):
            if known[slot] < CONTEXT_TOKENS:
                tokens = min(left[slot], rng.choice([16, 64, 200, 500]))
                work.append(Work(Slot(slot), tokens, tokens >= left[slot]))
        if not work:
            continue
        did, same = (engine.execute(work, None) for engine in (real, sim))
        loads += did.loaded_s > 0
        for entry, one, other in zip(work, did.done, same.done, strict=True):
            assert (one.computed, one.cached, len(one.tokens)) == (
                other.computed,
                other.cached,
                len(other.tokens),
            )
            left[entry.slot] += len(one.tokens) - one.computed
            known[entry.slot] += len(one.tokens)
            cached += one.cached
            lapsed += not one.computed
        # their answers differ, and so do the hashes
        assert [len(each) for each in did.prefixes] == [len(each) for each in same.prefixes]
        free, _, shared, _ = real.snapshot()
        assert (free, shared) == (sim.snapshot().free_blocks, sim.snapshot().shared_blocks)
        evicted += free < 4
        real.check()
        sim.check()
    assert cached > 1000 and lapsed > 5 and evicted > 5
    assert (loads > 0) == (host_blocks > 0)
    assert brought > 5
