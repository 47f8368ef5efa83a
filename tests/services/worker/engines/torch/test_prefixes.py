"""Prefix caching in the torch engine: what is shared, what it says of it, and what gives way."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engine import Done
from shared.columns import pack
from shared.core.worker.step import Load, Work
from shared.models import shipped
from shared.schemas import Sampling, Selection
from shared.vocabulary import Slot

torch = pytest.importorskip("torch")

from services.worker.engines.torch import draft_model  # noqa: E402
from services.worker.engines.torch.attention.attention import Branches, Part, positions_of  # noqa: E402
from services.worker.engines.torch.engine import TorchEngine  # noqa: E402
from services.worker.engines.torch.paged import Blocks, Place  # noqa: E402
from services.worker.engines.torch.prefixes import Prefix  # noqa: E402
from tests.services.worker.tiny_models import near, tiny_model  # noqa: E402

PROMPT = [(11 * n) % 256 for n in range(42)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "Llama")


def engine_of(model: Path, kv_blocks: int = 40, draft: Path | None = None) -> TorchEngine:
    return TorchEngine(
        model, profile="toy", device="cpu", kv_blocks=kv_blocks, block_tokens=4, draft=draft
    )


def ask(engine: TorchEngine, slot: int, prompt: Sequence[int]) -> Done:
    """Loads the request and computes its whole prompt."""
    engine.load(Load(Slot(slot), prompt, 0, Sampling(temperature=0.0), 1))
    return engine.execute([Work(Slot(slot), len(prompt), True)], None).done[0]


def go_on(engine: TorchEngine, slot: int, tokens: int) -> list[int]:
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


def test_what_is_found_never_takes_the_room_that_the_batch_was_promised(model: Path) -> None:
    engine = engine_of(model, kv_blocks=12)
    ask(engine, 0, PROMPT)  # eleven blocks
    engine.release(Slot(0))
    for slot, prompt in ((0, PROMPT), (1, [9] * 40)):
        engine.load(Load(Slot(slot), prompt, 0, Sampling(temperature=0.0), 1))
    done = engine.execute([Work(Slot(0), 4, False), Work(Slot(1), 40, True)], None).done
    assert [(did.computed, did.cached) for did in done] == [(4, 0), (40, 0)]
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


def test_the_drafts_prefixes_are_shared_too(model: Path) -> None:
    engine = engine_of(model, draft=model)  # every draft is right
    draft = engine._draft
    assert draft is not None
    speculation = Selection(method="chain", depth=pack([3]), width=pack([1]), budget_tokens=4)
    said = []
    for slot in range(2):
        ask(engine, slot, PROMPT)
        before = draft.free_blocks
        done = engine.execute([Work(Slot(slot), 4, True)], speculation).done[0]
        said.append(list(done.tokens))
        assert len(done.tokens) == 4
        # the first takes twelve blocks of its own, the second shares the prompt's ten full ones
        assert before - draft.free_blocks == (2 if slot else 12)
    assert said[0] == said[1]
    for slot in range(2):
        engine.release(Slot(slot))
    engine.check()
    assert draft.free_blocks == draft.kv_blocks


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


def test_nobody_writes_to_a_shared_block_of_the_targets_kv(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of eight requests begins with all that the one before it has said by then, and one token
    more. Between two of them all decode with trees, of which some nodes are accepted and moved.
    """
    engine = engine_of(model, kv_blocks=200, draft=near(tmp_path, model, noise=0.6))
    logits, move = engine._model.logits, engine._model.move
    blocks, seen = engine._blocks, Counter[str]()

    def written(positions: Sequence[int], how: str) -> None:
        for block in {position // 4 for position in positions}:
            assert blocks._owners[block] == 1, f"a shared block is written: {how}"
            assert block not in blocks._hash_of, f"a block that others may find is written: {how}"
            seen[how] += 1

    def watched(ids: Sequence[int], parts: Sequence[Part], rows: Sequence[int]) -> Any:
        seen["trees"] += sum(isinstance(part, Branches) for part in parts)
        written(positions_of(parts)[1], "in a pass")
        return logits(ids, parts, rows)

    def watched_move(sources: Sequence[int], targets: Sequence[int]) -> None:
        written(targets, "moved")
        move(sources, targets)

    monkeypatch.setattr(engine._model, "logits", watched)
    monkeypatch.setattr(engine._model, "move", watched_move)
    text = PROMPT
    for slot in range(8):
        seen["cached"] += ask(engine, slot, text).cached
        decodes = slot + 1
        trees = Selection(
            method="slo_then_throughput", depth=pack([3] * decodes), width=pack([2] * decodes),
            budget_tokens=256,
        )  # fmt: skip
        for _ in range(3):
            engine.execute([Work(Slot(n), 7, True) for n in range(decodes)], trees)
            seen["shared"] += engine.snapshot().shared_blocks
        text = [*engine._slots[Slot(slot)].tokens, slot]
    print(seen)
    engine.check()
    assert all(seen[what] > 0 for what in ("cached", "shared", "trees", "in a pass", "moved"))


@given(st.integers(0, 2**32), st.integers(4, 30), st.integers(1, 4))
def test_a_block_is_free_known_or_owned_and_its_tokens_are_those_of_its_hash(
    seed: int, total: int, size: int
) -> None:
    rng = Random(seed)
    blocks = Blocks(total, size)
    content: dict[int, int] = {}  # pool position -> token
    held: list[tuple[Place, Prefix, list[int]]] = []
    for _ in range(120):
        if held and rng.random() < 0.4:
            place, _, _ = held.pop(rng.randrange(len(held)))
            blocks.release(place)
        else:
            text = [rng.randrange(2) for _ in range(rng.randint(1, 8 * size))]
            place, prefix = Place(size, len(text)), Prefix(size)
            found = prefix.begin(blocks, place, text, rng.choice([0, blocks.free]))
            assert found < len(text)
            at = place.positions(0, found).tolist()
            assert [content[position] for position in at] == text[:found]
            if -(-len(text) // size) - len(place.blocks) <= blocks.free:
                blocks.grow(place, len(text))
                at = place.positions(found, len(text)).tolist()
                content.update(zip(at, text[found:], strict=True))
                prefix.name(blocks, place, text, len(text))
            held.append((place, prefix, text))
        blocks.check(place for place, _, _ in held)
    for place, _, _ in held:
        blocks.release(place)
    assert blocks.free == total


def test_an_engine_reports_what_requests_share_of_the_drafts_kv() -> None:
    """The shipped models, and four requests of one prompt with 20 full blocks."""
    engine = TorchEngine(
        shipped.folder(shipped.DEFAULT),
        profile="cpu",
        device="cpu",
        kv_blocks=128,
        draft=shipped.draft_folder("", shipped.DEFAULT),
    )
    speculation = Selection(method="chain", depth=pack([2]), width=pack([1]), budget_tokens=3)
    prompt = [7 + n % 90 for n in range(20 * engine.facts.block_tokens + 3)]
    for slot in range(4):
        ask(engine, slot, prompt)
        state = engine.snapshot()
        assert (state.shared_blocks, state.draft_shared_blocks) == (20 * slot, 0)
    for slot in range(4):
        engine.execute([Work(Slot(slot), 3, True)], speculation)
        assert engine.snapshot().draft_shared_blocks == 20 * slot
    engine.preempt(Slot(0))
    assert engine.snapshot().draft_shared_blocks == 40
    engine.release(Slot(1))
    assert engine.snapshot().draft_shared_blocks == 20
    engine.release(Slot(2))
    assert engine.snapshot().draft_shared_blocks == 0
    engine.check()
