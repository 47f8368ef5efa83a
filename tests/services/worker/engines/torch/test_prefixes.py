"""Tests of prefix caching in the torch engine: what is shared, reported, and evicted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from services.worker.engine import Done, KvName
from shared.core.worker.step import Load, Work
from shared.schemas import Sampling
from shared.vocabulary import Slot

torch = pytest.importorskip("torch")

from services.worker.engines.torch import draft_model  # noqa: E402
from services.worker.engines.torch.attention.attention import Part, positions_of  # noqa: E402
from services.worker.engines.torch.engine import TorchEngine  # noqa: E402
from services.worker.engines.torch.prefixes import Prefix  # noqa: E402
from tests.services.worker.tiny_models import tiny_model  # noqa: E402

PROMPT = [(11 * n) % 256 for n in range(42)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "Llama")


def engine_of(model: Path, kv_blocks: int = 40, **more: Any) -> TorchEngine:
    return TorchEngine(
        model, profile="toy", device="cpu", kv_blocks=kv_blocks, block_tokens=4, **more
    )


def ask(engine: TorchEngine, slot: int, prompt: Sequence[int]) -> Done:
    """Loads the request and computes its whole prompt."""
    engine.load(Load(Slot(slot), prompt, 0, Sampling(temperature=0.0), 1))
    return engine.execute([Work(Slot(slot), len(prompt), True)], None).done[0]


def go_on(engine: TorchEngine, slot: int, tokens: int) -> list[int]:
    """Generate so many more tokens of the request."""
    work = [Work(Slot(slot), 1, True)]
    return [engine.execute(work, None).done[0].tokens[0] for _ in range(tokens)]


def test_a_prompt_that_begins_like_another_computes_only_the_rest(model: Path) -> None:
    engine = engine_of(model)
    first = ask(engine, 0, PROMPT)
    assert (first.computed, first.cached) == (42, 0)
    free = engine.snapshot().free_blocks
    again = ask(engine, 1, PROMPT)  # beside the first
    assert (again.computed, again.cached, again.tokens) == (42, 40, first.tokens)
    assert engine.snapshot().free_blocks == free - 1, "the ten full blocks are shared"
    assert go_on(engine, 0, 9) == go_on(engine, 1, 9)
    other = ask(engine, 2, [*PROMPT[:22], *PROMPT[:9]])
    assert other.cached == 20
    for slot in range(3):
        engine.release(Slot(slot))
    engine.check()
    assert engine.snapshot() == (40, [], 0, 0)
    # nobody holds it now, and it is still known: the output of the first request, too
    longer = ask(engine, 0, [*PROMPT, *first.tokens, 1, 2, 3])
    assert longer.cached == 40
    fresh = ask(engine_of(model), 0, [*PROMPT[:22], *PROMPT[:9]])
    assert fresh.tokens == other.tokens


def test_the_last_token_is_always_computed(model: Path) -> None:
    engine = engine_of(model)
    first = ask(engine, 0, PROMPT[:40])
    again = ask(engine, 1, PROMPT[:40])
    assert (again.computed, again.cached, again.tokens) == (40, 36, first.tokens)


def test_a_preempted_request_finds_what_it_had(model: Path) -> None:
    engine = engine_of(model)
    alone = ask(engine, 0, PROMPT).tokens + go_on(engine, 0, 12)
    engine.release(Slot(0))
    engine = engine_of(model)
    said = ask(engine, 0, PROMPT).tokens + go_on(engine, 0, 5)
    engine.preempt(Slot(0))
    assert engine.snapshot().free_blocks == 40
    done = engine.execute([Work(Slot(0), 48, True)], None).done[0]
    assert (done.computed, done.cached) == (48, 44)
    assert [*said, *done.tokens, *go_on(engine, 0, 6)] == alone


def test_the_prefix_used_longest_ago_gives_way(model: Path) -> None:
    engine = engine_of(model, kv_blocks=24)
    prompts = [[(n + 5 * k) % 256 for k in range(33)] for n in range(3)]  # nine blocks each
    for slot, prompt in enumerate(prompts[:2]):
        ask(engine, slot, prompt)
    engine.release(Slot(1))
    engine.release(Slot(0))
    ask(engine, 2, prompts[2])  # six blocks were never used, three must go
    engine.release(Slot(2))
    assert ask(engine, 0, prompts[0]).cached == 32, "it was left last"
    engine.release(Slot(0))
    assert 0 < ask(engine, 1, prompts[1]).cached < 32, "its end went first"
    engine.check()


@pytest.mark.parametrize("family", ["Llama", "Gemma"])
def test_what_comes_back_from_the_host_is_what_was_computed(
    family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = tiny_model(tmp_path_factory.mktemp("model"), family)
    prompts = [[(n + 5 * k) % 256 for k in range(33)] for n in range(4)]  # nine blocks each

    def turns(host_kv_tokens: int) -> tuple[list[Sequence[int]], int, float]:
        """Each prompt twice, in turn, on a GPU that has room for two."""
        engine = engine_of(model, 20, host_kv_tokens=host_kv_tokens)
        said, cached, loaded_s = list[Sequence[int]](), 0, 0.0
        for prompt in prompts * 2:
            engine.load(Load(Slot(0), prompt, 0, Sampling(temperature=0.0), 1))
            outcome = engine.execute([Work(Slot(0), len(prompt), True)], None)
            said.append([*outcome.done[0].tokens, *go_on(engine, 0, 4)])
            cached += outcome.done[0].cached
            loaded_s += outcome.loaded_s
            engine.release(Slot(0))
            engine.check()
        return said, cached, loaded_s

    without, with_host = turns(0), turns(200)
    assert with_host[0] == without[0]
    assert (without[1:], with_host[1]) == ((0, 0.0), 4 * 32)
    assert with_host[2] > 0.0


def take(engine: TorchEngine, text: Sequence[int]) -> tuple[list[KvName], list[memoryview]]:
    """The blocks that the engine has of this text, and their KV. Another says their names."""
    stranger = Prefix(4)
    names = stranger.names(text)
    assert engine.facts.kv is not None
    into = [memoryview(bytearray(engine.facts.kv.block_bytes)) for _ in names]
    there = engine.take_out([name.digest for name in names], into)
    kept = [n for n, has in enumerate(there) if has]
    return [names[n] for n in kept], [into[n] for n in kept]


@pytest.mark.parametrize("host_kv_tokens", [0, 400])
def test_kv_is_taken_out_of_the_gpu_and_of_the_host_and_told_of_where_it_comes(
    model: Path, host_kv_tokens: int
) -> None:
    text = [(7 * n) % 256 for n in range(133)]  # 33 full blocks; two prefixes end in it
    one = engine_of(model, 60, host_kv_tokens=host_kv_tokens)
    said = [*ask(one, 0, text).tokens, *go_on(one, 0, 5)]
    one.release(Slot(0))
    ask(one, 0, [9] * 180)  # 45 blocks: most of the first text gives way
    names, payloads = take(one, text)
    assert len(names) == (33 if host_kv_tokens else 15)
    other = engine_of(model, 100)
    lacking = other.lacking(text, b"")
    assert lacking.tokens == 0 and list(lacking.names)[: len(names)] == names
    assert all(other.bring_in(names, payloads))
    other.load(Load(Slot(0), text, 0, Sampling(temperature=0.0), 1))
    outcome = other.execute([Work(Slot(0), len(text), True)], None)
    marks = [name.mark for name in names if name.mark is not None]
    assert set(marks) <= set(outcome.prefixes.kept) and len(marks) == (2 if host_kv_tokens else 0)
    assert outcome.done[0].cached == 4 * len(names)
    assert [*outcome.done[0].tokens, *go_on(other, 0, 5)] == said
    other.check()


def test_what_a_text_begins_with_does_not_give_way_to_what_comes_of_it(model: Path) -> None:
    text = PROMPT[:41]  # ten full blocks
    one, other = engine_of(model), engine_of(model, kv_blocks=12)
    ask(one, 0, text)
    names, payloads = take(one, text)
    ask(other, 0, text[:17])  # four of them
    other.release(Slot(0))
    ask(other, 0, [9] * 28)  # seven: five blocks are free, of which the four are known
    lacking = other.lacking(text, b"")
    assert (lacking.tokens, len(lacking.names)) == (16, 1)
    assert other.bring_in(names[4:5], payloads[4:5]) == [True]
    assert other.lacking(text, b"") == (20, [])
    assert other.bring_in(names[:6], payloads[:6]) == [True] * 6, "one more: the oldest gave way"
    other.check()
    other.release(Slot(0))
    assert other.snapshot() == (12, [], 0, 0)


@pytest.mark.parametrize("host_kv_tokens", [0, 200])
def test_an_engine_that_restarts_has_forgotten_all_prefixes(
    model: Path, host_kv_tokens: int
) -> None:
    engine = engine_of(model, 20, host_kv_tokens=host_kv_tokens)
    for slot, first in enumerate((0, 100, 200)):
        ask(engine, slot, [(first + n) % 256 for n in range(33)][: 33 if slot < 2 else 8])
    engine.restart()
    engine.check()
    assert engine.snapshot() == (20, [], 0, 0)
    assert ask(engine, 0, list(range(33))).cached == 0
    engine.check()


def test_an_entry_without_room_does_nothing(model: Path) -> None:
    engine = engine_of(model, kv_blocks=12)
    ask(engine, 0, PROMPT)
    engine.release(Slot(0))
    for slot, prompt in ((0, PROMPT), (1, [9] * 8)):
        engine.load(Load(Slot(slot), prompt, 0, Sampling(temperature=0.0), 1))
    # a planner that counts one block for the first entry has eleven left for the second request
    assert engine.execute([Work(Slot(0), 4, False)], None).done[0].cached == 40
    did = engine.execute([Work(Slot(1), 8, True)], None).done[0]
    assert (did.computed, did.tokens) == (0, ())
    engine.release(Slot(0))
    assert engine.execute([Work(Slot(1), 8, True)], None).done[0].computed == 8


def test_nobody_writes_to_a_shared_block_of_the_drafts_kv(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of four full blocks drafts, and its tree finds no room in the target's KV. Another
    begins with the same text. Then the first drafts again, and reads its newest token again.
    """
    draft = draft_model.DraftModel(
        model,
        torch.device("cpu"),
        torch.float32,
        kv_blocks=40,
        block_tokens=4,
        vocabulary=261,
        prefix_caching=True,
    )
    logits, written = draft._model.logits, list[int]()

    def watched(ids: Sequence[int], parts: Sequence[Part], rows: Sequence[int]) -> Any:
        written.extend(position // 4 for position in positions_of(parts)[1])
        return logits(ids, parts, rows)

    monkeypatch.setattr(draft._model, "logits", watched)
    text = PROMPT[:16]
    first = draft_model.Ask(Slot(0), text, 2, 1, 0.0)
    other = draft_model.Ask(Slot(1), [*text, 3, 4, 5], 2, 1, 0.0)
    with torch.inference_mode():
        for ask in (first, other):
            draft.draft([ask])
            draft.keep([draft_model.Accepted(ask.slot, ask.tokens, [])])
        shared = {block for block in range(draft.kv_blocks) if draft._blocks._owners[block] > 1}
        assert len(shared) == draft.shared_blocks > 0
        written.clear()
        draft.draft([first])
    assert written
    assert not shared.intersection(written)
