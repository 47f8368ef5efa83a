"""Tests of KV that moves between vLLM engines: a text goes on elsewhere with the same tokens, and
only its rest is computed there.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm")

from services.worker.engine import KvName
from services.worker.engines.torch.prefixes import Prefix
from shared.core.worker.step import Work
from shared.prefix import chain_of, salt_of
from shared.vocabulary import Slot
from tests.services.worker.vllm.adapter import write_adapter
from tests.services.worker.vllm.conftest import OURS, OUTPUT_TOKENS, Case, built
from tests.services.worker.vllm.random_plans import Asked, Habits, Play, load

ROOT = Path(__file__).parents[4]
BLOCK, HALF = 32, OUTPUT_TOKENS // 2
PROMPT = [7 + n * n % 997 for n in range(150)]  # four whole blocks, and 22 tokens more
Cases = Callable[[str], Case]
Kv = tuple[Sequence[KvName], Sequence[memoryview]]


def names_of(tokens: Sequence[int], salt: bytes = b"") -> Sequence[KvName]:
    """The names of a text's whole blocks, but for that of its last token."""
    return Prefix(BLOCK, salt).names(tokens[: len(tokens) - 1])


def taken_out(engine: Any, names: Sequence[KvName]) -> Kv:
    """Those of these blocks that the engine has."""
    places = [memoryview(bytearray(engine.facts.kv.block_bytes)) for _ in names]
    there = engine.take_out([name.digest for name in names], places)
    kept = [n for n, is_there in enumerate(there) if is_there]
    return [names[n] for n in kept], [places[n] for n in kept]


def compute(engine: Any, tokens: Sequence[int], n: int, adapter: str = "") -> tuple[list[int], int]:
    """The next `n` greedy tokens, and how many positions were found in the cache."""
    load(engine, 0, Asked(tokens, n, adapter=adapter))
    output, cached, left = list[int](), 0, len(tokens)
    while len(output) < n:
        [done] = engine.execute([Work(Slot(0), left, True)], None).done
        output, cached, left = [*output, *done.tokens], cached + done.cached, 1
    engine.release(Slot(0))
    return output, cached


@pytest.fixture(scope="module")
def other(adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A second engine like `caching`, with the same adapters in other folders."""
    third = write_adapter(tmp_path_factory.mktemp("adapter"), OURS, seed=4)
    same = write_adapter(tmp_path_factory.mktemp("adapter"), OURS, seed=3)
    engine = built(OURS, {"max_lora_rank": 8}, adapters={"other": str(same), "third": str(third)})
    yield engine
    engine.close()


@pytest.mark.parametrize("adapter", ["", "other"])
def test_a_text_goes_on_in_another_engine_and_only_its_rest_is_computed(
    caching: Any, other: Any, case: Cases, adapter: str
) -> None:
    assert caching.facts.kv == other.facts.kv
    known, salt = case("ours"), salt_of("", adapter)
    for n in known.firm[:5]:
        output = known.others[n] if adapter else known.outputs[n]
        text = [*known.prompts[n], *output[:HALF]]
        blocks = (len(text) - 1) // BLOCK
        compute(caching, known.prompts[n], HALF + 1, adapter)
        lacking = other.lacking(text, salt)
        assert lacking == (0, names_of(text, salt))
        names, payloads = taken_out(caching, lacking.names)
        assert other.bring_in(names, payloads) == [True] * blocks
        assert other.lacking(text, salt) == (blocks * BLOCK, [])
        rest = compute(other, text, OUTPUT_TOKENS - HALF, adapter)
        assert rest == (output[HALF:], blocks * BLOCK)
        other.restart()


def test_what_came_is_told_as_a_prefix_until_its_blocks_are_needed(caching: Any) -> None:
    chain, names = chain_of(PROMPT, b"mine"), names_of(PROMPT, b"mine")
    load(caching, 0, Asked(PROMPT, 1), salt=b"mine")
    caching.execute([Work(Slot(0), len(PROMPT), True)], None)
    caching.release(Slot(0))
    kv = taken_out(caching, names)
    caching.restart()
    assert taken_out(caching, names) == ([], [])
    assert caching.bring_in(*kv) == [True] * 4
    assert taken_out(caching, names) == kv
    assert list(caching.execute([], None).prefixes.kept) == list(chain)
    rng, dropped = Random(2), list[int]()
    while not set(chain) <= set(dropped):  # other prompts need its blocks
        load(caching, 0, Asked([rng.randrange(5, 2000) for _ in range(8 * BLOCK)], 1))
        dropped += caching.execute([Work(Slot(0), 8 * BLOCK, True)], None).prefixes.dropped
        caching.release(Slot(0))
    assert caching.lacking(PROMPT, b"mine") == (0, names)


def test_only_idle_blocks_are_filled_and_what_is_known_of_the_text_stays(caching: Any) -> None:
    caching.restart()
    rng = Random(1)
    long, holder = ([rng.randrange(5, 2000) for _ in range(15 * BLOCK + 1)] for _ in range(2))
    compute(caching, long, 1)
    names, payloads = taken_out(caching, names_of(long))
    caching.restart()
    # of 24 blocks twelve are somebody's, and four of the text are known
    load(caching, 1, Asked(holder, 1))
    caching.execute([Work(Slot(1), 12 * BLOCK, False)], None)
    compute(caching, long[: 4 * BLOCK], 1)
    lacking = caching.lacking(long, b"")
    assert lacking == (4 * BLOCK, names[4:12])
    assert caching.bring_in(names[4:12], payloads[4:12]) == [True] * 8
    assert caching.lacking(long, b"") == (12 * BLOCK, [])
    assert caching.snapshot().free_blocks == 12
    # who holds blocks has them still, and comes no room short
    done = caching.execute([Work(Slot(1), 3 * BLOCK + 1, True)], None).done
    assert (done[0].computed, len(done[0].tokens)) == (3 * BLOCK + 1, 1)
    caching.release(Slot(1))


@pytest.mark.parametrize("seed", range(2))
def test_outputs_are_the_same_while_blocks_come_and_go(
    caching: Any, case: Cases, seed: int
) -> None:
    known, rng = case("ours"), Random(seed)
    chosen = known.firm[:7]
    kv = dict[bytes, tuple[KvName, memoryview]]()

    class Moves(Play):
        def step(self) -> None:
            super().step()
            n = rng.choice(chosen)
            text = [*known.prompts[n], *known.outputs[n]]
            for name, place in zip(*taken_out(caching, names_of(text)), strict=True):
                kv[name.digest] = name, place
            some = rng.sample(sorted(kv), min(4, len(kv)))
            caching.bring_in([kv[each][0] for each in some], [kv[each][1] for each in some])

    play = Moves(caching, Random(seed), Habits(preempt=0.05, release=0.02), caching=True)
    outputs = play.run([Asked(known.prompts[n], OUTPUT_TOKENS) for n in chosen])
    for m, output in outputs.items():
        assert output == known.outputs[chosen[m]][: len(output)]
    assert play.cached_tokens > 0


def test_engines_whose_kv_means_something_else_say_so(
    caching: Any, other: Any, drafting_and_caching: Any, plain: Any, tmp_path: Path
) -> None:
    from services.worker.engines.vllm.layout import layout_of

    assert plain("ours").facts.kv is None  # it names no blocks
    config, shapes = caching._engine.vllm_config, [[("float32", (2, 32, 128), 4)]]
    adapters = {name: one.lora_path for name, one in caching._adapters.items()}
    retrained = {**adapters, "third": str(write_adapter(tmp_path, OURS, seed=5))}
    small = plain("small")._engine.vllm_config
    layouts = [
        caching.facts.kv.layout,
        drafting_and_caching.facts.kv.layout,
        layout_of(config, shapes, adapters),
        layout_of(config, shapes, retrained),
        layout_of(config, shapes, {}),
        layout_of(config, [[("bfloat16", (2, 32, 128), 2)]], adapters),
        layout_of(small, shapes, adapters),
    ]
    assert len(set(layouts)) == len(layouts)


SPLIT = """
import json, sys
from random import Random
from shared.core.worker.step import Work
from tests.services.worker.vllm.conftest import OURS, built
from tests.services.worker.vllm.test_moving import compute, names_of, taken_out
if __name__ == "__main__":
    prompt, n, folder, options = json.loads(sys.argv[1])
    engine = built(OURS, options)
    first, _ = compute(engine, prompt, n)
    names, payloads = taken_out(engine, names_of(prompt))
    engine.restart()
    assert compute(engine, prompt, 1)[1] == 0
    engine.restart()
    assert all(engine.bring_in(names, payloads))
    again, cached = compute(engine, prompt, n)
    kv = engine.facts.kv
    print("kv", json.dumps([kv.layout, kv.block_bytes, cached, first, again]))
    for name, payload in zip(names, payloads):
        with open(f"{folder}/{name.digest.hex()}", "wb") as file:
            file.write(payload)
    engine.close()
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_kv_moves_between_processes_and_of_a_model_that_is_split(
    case: Cases, tmp_path: Path, processes: int
) -> None:
    known = case("ours")
    n = max(known.firm, key=lambda n: len(known.prompts[n]))
    program = tmp_path / "moved.py"  # a file, since vLLM's processes begin by importing it
    program.write_text(SPLIT)
    options = {"tensor_parallel_size": processes} if processes > 1 else {}
    asked = json.dumps([known.prompts[n], OUTPUT_TOKENS, str(tmp_path), options])
    ran = subprocess.run(
        [sys.executable, str(program), asked], cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    line = next(line for line in ran.stdout.splitlines() if line.startswith("kv "))
    layout, block_bytes, cached, first, again = json.loads(line[3:])
    names = names_of(known.prompts[n])
    assert (cached, first, again) == (len(names) * BLOCK, known.outputs[n], known.outputs[n])
    here = built(OURS, {})
    assert here.facts.kv.block_bytes == block_bytes
    assert (here.facts.kv.layout == layout) == (processes == 1)
    if processes == 1:
        payloads = [memoryview((tmp_path / name.digest.hex()).read_bytes()) for name in names]
        assert all(here.bring_in(names, payloads))
        assert compute(here, known.prompts[n], OUTPUT_TOKENS) == (first, len(names) * BLOCK)
    here.close()
