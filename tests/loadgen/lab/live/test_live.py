"""The live comparison: what is rebuilt from plans and acks, what is foretold, and a fleet."""

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console

from loadgen.fleet.fleet import Fleet
from loadgen.lab.live.__main__ import in_turns, main
from loadgen.lab.live.iterations import Followed, Iteration, Trees
from loadgen.lab.live.load import QUESTIONS, WORDS, Questions, RisingLoad
from loadgen.lab.live.prediction import acceptance_of, cost_of, foretell, measured
from loadgen.lab.live.rows import Row, attained, markdown, phases
from loadgen.lab.live.serving import ALONE, VLLM_DRAFTS, System, fleet_spec, serve
from loadgen.trials.comparison import Contestant
from shared.columns import pack
from shared.models import shipped as models
from shared.perf.draft import Draft
from shared.perf.shape import BatchShape
from shared.policy.speculation import draft_s
from shared.schemas import BatchPlan, Held, PlanAck, Selection
from shared.text.tokenizer import Tokenizer
from shared.vocabulary import ReplicaId, RequestKey
from tests.loadgen.load.test_heartbeats import heartbeat
from tests.shared.policy.views import Linear

REPLICA = ReplicaId("r1")
LOAD = RisingLoad((2.0, 6.0, 12.0), 30.0, (0.1, 0.2, 0.4), seed=3)
FACTS = replace(
    heartbeat(REPLICA, 2048, "cpu-tiny"), kv_blocks=2048, max_slots=256, draft=(0.3, 0.1)
)


@pytest.fixture(scope="module")
def prompts() -> Questions:
    return Questions(Tokenizer.load(models.folder(models.DEFAULT)), LOAD.seed)


def test_the_load_rises_and_is_the_same_for_the_same_seed(prompts: Questions) -> None:
    requests = LOAD.requests(prompts)
    assert requests == LOAD.requests(prompts)
    counts = [sum(LOAD.stage(one) == stage for one in requests) for stage in range(3)]
    assert counts == sorted(counts)
    for count, rate in zip(counts, LOAD.rates_per_s, strict=True):
        assert count == pytest.approx(10 * rate, abs=4 * math.sqrt(10 * rate))
    assert {one.tier for one in requests} == {"tight", "medium", "loose"}
    assert all(one.prompt_tokens == len(prompts.of(one.number)) for one in requests)
    assert len({tuple(prompts.of(n)) for n in range(2000)}) > len(WORDS) * len(QUESTIONS) / 2


# ---------------------------------------------------------------- iterations


def plan(seq: int, slots: list[int], depth: list[int] | None = None, width: int = 1) -> BatchPlan:
    selection = None
    if depth is not None:
        selection = Selection(
            method="chain",
            depth=pack(depth),
            width=pack([width] * len(slots)),
            lasts_s=0.01,
            budget_tokens=99,
        )
    return BatchPlan(
        replica=REPLICA,
        incarnation="one",
        epoch=1,
        sync=1,
        seq=seq,
        slots=pack(slots),
        caps=pack([9] * len(slots)),
        predicted_s=0.01,
        selection=selection,
    )


def ack(
    seq: int, slots: list[int], computed: list[int], emitted: list[int], **more: Any
) -> PlanAck:
    return PlanAck(
        replica=REPLICA,
        incarnation="one",
        epoch=1,
        plan_seq=seq,
        ack_seq=seq,
        slots=pack(slots),
        computed=pack(computed),
        emitted=pack(emitted),
        **more,
    )


def held(slot: int) -> Held:
    return Held(slot=slot, key=RequestKey(f"default.{slot}"), attempt=1)


def test_iterations_are_rebuilt_from_plans_and_acks() -> None:
    followed = Followed()
    followed.on_plan(plan(1, [0, 1]), None)
    first = ack(1, [0, 1], [20, 8], [1, 0], held=[held(0), held(1)], cached=pack([16, 0]))
    followed.on_ack(first, None)
    followed.on_plan(plan(2, [0, 1], [3, 0]), None)
    followed.on_ack(
        ack(
            2, [0, 1], [3, 4], [3, 1],
            drafted=pack([3, 0]), exec_s=0.010, drafted_s=0.004, idle_s=0.001, late_s=0.002,
        ),
        None,
    )  # fmt: skip
    followed.on_plan(plan(3, [0, 1], [2, 2]), None)
    followed.on_ack(ack(3, [0, 1], [1, 2], [1, 2], drafted=pack([2, 1]), drafted_s=0.003), None)
    prefill, mixed, verifying = followed.iterations
    # 16 of the 20 positions were found in the prefix cache
    assert prefill.shape == BatchShape(4 + 8, 2, 16.0 + 64.0, 64.0, 16)
    assert mixed.shape == BatchShape(4 + 3, 1, 16.0 + 9.0, 32.0 + 60.0, 8, 1, 20, drafts=3)
    assert (mixed.verifications, mixed.drafted, mixed.accepted, mixed.tokens) == (1, 3, 2, 4)
    assert mixed.draft_s == 0.004
    assert mixed.pass_s == pytest.approx(0.006)
    assert mixed.rest_s == pytest.approx(0.003)
    assert mixed.trees is not None
    # the draft model has nothing of the context of slot 0 yet, and 23 positions afterwards
    assert mixed.trees.missing.tolist() == [21]
    assert verifying.trees is not None
    assert verifying.trees.context.tolist() == [24, 13]
    assert verifying.trees.missing.tolist() == [1, 13]
    assert verifying.first_accepted == 1


def test_an_engine_of_chains_drafts_what_it_verifies_as_deep_as_the_deepest() -> None:
    followed = Followed(chains=True)
    followed.on_plan(plan(1, [0, 1, 2]), None)
    followed.on_ack(ack(1, [0, 1, 2], [20, 8, 9], [1, 1, 1]), None)
    followed.on_plan(plan(2, [0, 1, 2], [5, 5, 5], width=3), None)
    drafted = pack([3, 0, 1])
    followed.on_ack(ack(2, [0, 1, 2], [3, 1, 2], [3, 1, 2], drafted=drafted, drafted_s=0.1), None)
    trees = followed.iterations[1].trees
    assert trees is not None
    assert [column.tolist() for column in trees] == [[3, 3], [1, 1], [21, 10], [21, 10]]


def test_a_preempted_request_prefills_again() -> None:
    followed = Followed()
    for seq, more in ((1, {"held": [held(0)]}), (2, {"preempted": pack([0])})):
        followed.on_plan(plan(seq, [0]), None)
        followed.on_ack(ack(seq, [0], [20], [1], **more), None)
    assert [one.shape.prefill_tokens for one in followed.iterations] == [20, 20]


def iteration(decodes: int, drafted: int = 0, accepted: int = 0, **more: Any) -> Iteration:
    shape = BatchShape(decodes=decodes, decode_context=50 * decodes)
    if drafted:
        shape = shape.with_drafts(
            np.full(decodes, drafted // decodes, dtype=np.int32),
            np.full(decodes, 50, dtype=np.int32),
        )
    values: dict[str, Any] = {
        "verifications": decodes if drafted else 0,
        "first_accepted": min(accepted, decodes),
        "tokens": decodes + accepted,
        "rest_s": 0.001,
        "late_s": 0.0005,
        "draft_s": 0.0,
        "pass_s": Linear().batch_s(shape),
        "trees": None,
    }
    return Iteration(shape=shape, drafted=drafted, accepted=accepted, **(values | more))


def test_phases_are_of_the_iterations_with_decodes() -> None:
    found = phases(
        [
            iteration(4, 8, 4, pass_s=0.012, draft_s=0.002),
            iteration(4, pass_s=0.010),
            iteration(0, pass_s=9.0),
        ]
    )
    assert found is not None
    assert (found.iterations, found.tokens) == (2, 2.0)
    assert found.draft_s == pytest.approx(0.001)
    assert found.pass_s == pytest.approx(0.011)
    assert phases([iteration(0)]) is None


# ---------------------------------------------------------------- the simulator's prediction


def served(step: float, read: float) -> list[Iteration]:
    """Iterations of every size, with drafts and without, of an engine that is as `Linear`."""
    draft, found = Draft(Linear(), step, read), []
    for n in range(1, 60):
        found.append(iteration(n))
        trees = Trees(
            *(np.full(n, value, dtype=np.int32) for value in (1 + n % 3, 1, 51, 51 if n % 2 else 1))
        )
        seconds = draft_s(draft, **trees._asdict())
        found.append(iteration(n, 2 * n, n, draft_s=seconds, trees=trees))
        chunk = found[-2].shape.with_chunk(20 + n, 0)
        found.append(found[-2]._replace(shape=chunk, pass_s=Linear().batch_s(chunk)))
    return found


def test_the_cost_of_the_draft_and_its_acceptance_are_found() -> None:
    iterations = served(0.3, 0.1)
    step, read = cost_of(iterations, Linear(), 0.05)  # type: ignore[misc]
    assert step == pytest.approx(0.3, rel=0.01)
    assert read == pytest.approx(0.1, rel=0.05)
    # of two drafts one is accepted: a + a^2 = 1
    assert acceptance_of(iterations) == pytest.approx((5**0.5 - 1) / 2, abs=1e-3)
    assert cost_of([iteration(3)], Linear(), (0.2, 0.0)) == (0.2, 0.0)
    assert acceptance_of([iteration(3)]) is None
    # of chains of three 1.5 are accepted: 0.7 + 0.7^2 + 0.7^3 in the mean
    chains = [iteration(100, 300, 153), iteration(3)]
    assert acceptance_of(chains) == pytest.approx(0.7, abs=0.002)
    wide = Trees(*(np.array([value] * 100, dtype=np.int32) for value in (2, 3, 50, 1)))
    trees = [iteration(100, 600, 153, trees=wide, first_accepted=80)]
    assert acceptance_of(trees) == pytest.approx(0.8)
    found = measured(iterations, FACTS, 0.6)
    assert found.acceptance == 0.6
    assert sum(map(len, found.scatter.values())) == len(iterations)
    for times in found.scatter.values():
        assert times == pytest.approx([1.0] * len(times), rel=0.05)
    profile = found.file.profile()
    for one in iterations[::7]:
        # the hand-over counts as part of the iteration
        assert profile.batch_s(one.shape) == pytest.approx(one.pass_s + 0.0005, rel=0.05)


def test_chains_on_vllm_are_as_long_in_the_simulator(prompts: Questions, tmp_path: Path) -> None:
    requests = LOAD.requests(prompts)[:60]
    contestant = Contestant("vllm", {"spec_tokens": str(VLLM_DRAFTS + 3)})
    found = measured(served(0.3, 0.1), FACTS, 0.9)
    drafts = []
    for longest_chain in (0, VLLM_DRAFTS):
        facts = replace(FACTS, longest_chain=longest_chain)
        told = foretell(contestant, requests, LOAD.tiers, LOAD.seed, facts, found, tmp_path)
        drafts.append(told.drafted / told.verifications)
    assert drafts[0] > VLLM_DRAFTS + 2
    assert VLLM_DRAFTS - 1 < drafts[1] <= VLLM_DRAFTS


def row_of(prompts: Questions, name: str, kept: str, seed: int = 1) -> Row:
    """A turn in which one tier was in time."""
    requests = LOAD.requests(prompts)
    live = attained(LOAD, requests, [one.tier == kept for one in requests])
    return Row(name=name, seed=seed, requests=len(requests), took_s=31.0, live=live)


def test_the_table_has_a_line_for_each_system_with_the_mean_of_its_turns(
    prompts: Questions,
) -> None:
    told = attained(LOAD, LOAD.requests(prompts), [True] * len(LOAD.requests(prompts)))
    ours = replace(row_of(prompts, "slackline", "tight"), simulated=told, cost=(0.3, 0.1))
    ours = replace(ours, phases=phases([iteration(4, 8, 4, draft_s=0.002)]))
    other = replace(ours, seed=2, live=replace(ours.live, met=ours.live.met - 0.1))
    head, _, first, second = markdown(
        [ours, other, row_of(prompts, ALONE, "loose")], LOAD
    ).splitlines()
    assert head.count("|") == first.count("|") == second.count("|")
    most = 100 * ours.live.met
    assert f"| {most - 5:.1f} ({most - 10:.1f} to {most:.1f}) | 100.0 | " in first
    assert "| 100 | 0 | 0 |" in first and "| 0 | 0 | 100 |" in second
    assert "| 2 | 2.00 |" in first and "0.30, 0.10" in first
    assert msgspec.json.decode(msgspec.json.encode(ours), type=Row) == ours


async def test_engines_compute_on_one_thread_whatever_the_shell_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    for engine in ("torch", "vllm"):
        spec = fleet_spec(Contestant("vllm", {}), System(engine), tmp_path / "tiers.json")
        assert Fleet(spec)._environment()["OMP_NUM_THREADS"] == "1"


def test_a_number_of_turns_below_one_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["live", "--turns", "0"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "--turns 0: expected 1 or more" in capsys.readouterr().err


def test_each_turn_serves_all_systems_and_begins_with_another() -> None:
    systems = [Contestant("vllm", {}), Contestant("adaserve", {}), ALONE]
    order = in_turns([LOAD] * 3, systems)
    turns = [[system for _, system in order[n : n + 3]] for n in (0, 3, 6)]
    assert all(all(one in turn for one in systems) for turn in turns)
    assert [turn[0] for turn in turns] == systems


def test_attainment_is_of_what_was_offered(prompts: Questions) -> None:
    requests = LOAD.requests(prompts)
    met = [one.tier != "tight" for one in requests]
    found = attained(LOAD, requests, met)
    assert found.by_tier == {"tight": 0.0, "medium": 1.0, "loose": 1.0}
    assert found.met == pytest.approx(sum(met) / len(met))
    tokens = sum(one.output_tokens for one in requests if one.tier != "tight")
    assert found.goodput_tokens_per_s == pytest.approx(tokens / 30.0)


async def test_a_fleet_serves_the_load_and_tells_of_its_phases(prompts: Questions) -> None:
    pytest.importorskip("torch")
    load = RisingLoad((2.0, 3.0, 4.0), 6.0, (0.1, 0.2, 0.4), seed=3)
    console = Console(quiet=True)
    contestant = Contestant("vllm", {"spec_tokens": "2"})
    row, acceptance = await serve(contestant, System("torch"), load, prompts, None, console)
    assert row.requests == len(load.requests(prompts))
    assert row.phases is not None and row.simulated is not None
    assert row.phases.iterations > 20
    assert row.phases.draft_s > 0.0
    assert row.phases.pass_s > 0.0
    assert 1.0 < row.phases.tokens <= 3.0
    assert acceptance is not None
    assert 0.3 < acceptance < 0.99


def test_a_comparison_that_is_stopped_keeps_the_rows_that_had_ended(
    prompts: Questions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = row_of(prompts, "vllm", "tight")
    turns = iter([row])

    async def served_once(*_: Any) -> tuple[Row, float | None]:
        for ended in turns:
            return ended, None
        raise KeyboardInterrupt

    monkeypatch.setattr("loadgen.lab.live.__main__.serve", served_once)
    out = tmp_path / "out"
    monkeypatch.setattr("sys.argv", ["live", "--policies", "vllm,edf", "--out", str(out)])
    assert main() == 130
    assert "has the rows that had ended" in capsys.readouterr().err
    assert msgspec.json.decode((out / "rows.json").read_bytes(), type=list[Row]) == [row]
    assert "| `vllm` |" in (out / "table.md").read_text()
