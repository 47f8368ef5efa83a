"""Tests of ReplicaCore and WorkerCore together: whatever happens between them, every request ends
once with just its tokens.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from loadgen.bench.stand_in import decoding
from shared.core.replica.events import Heartbeat, SendPlan, Synced
from shared.core.replica.replica import ReplicaCore
from shared.core.tick import Tick
from shared.perf import profile_file as profiles
from shared.policy import registry
from shared.vocabulary import Slo
from tests import made
from tests.services.worker.engines.sharing_engine import SharingEngine
from tests.shared.core.replica_bench import Act, Ask, Bench
from tests.shared.core.replica_shells import World

INSTANTS = st.integers(0, 64 * 3).map(lambda n: n / 64)
SLOS = st.sampled_from(
    [
        Slo(ttft_s=0.25, tbt_s=0.03),
        Slo(ttft_s=2.0, tbt_s=0.1),
        Slo(ttlt_s=1.0),
        Slo(ttlt_s=60.0),
        Slo(ttft_s=1.0, thinking_tbt_s=0.03, tbt_s=0.1),
        Slo(thinking_tbt_s=0.1, tbt_s=0.03),
        Slo(ttft_s=0.5, thinking_tbt_s=0.05),
    ]
)
NOW = 1000.0
ACTS = ["cancel", "withdraw", "drain", "leave"]
FAULTS = ["lose_ack", "false_ack", "lose_plan", "lose_hold", "resync", "takeover"]


@st.composite
def schedules(
    draw: st.DrawFn,
    *,
    policies: list[str],
    faults: bool,
    wayward: bool = False,
    drafts: bool = False,
    sharing: str = "",
    rumours: bool = False,
) -> tuple[World, list[Ask], list[Act]]:
    block_tokens = draw(st.sampled_from([1, 4, 16]))
    kv_tokens = draw(st.sampled_from([32, 64, 160, 640]))
    policy = draw(st.sampled_from(policies))
    world = World(
        policy=policy,
        depth=draw(st.sampled_from([1, 2, 3])),
        kv_blocks=kv_tokens // block_tokens,
        block_tokens=block_tokens,
        slots=draw(st.sampled_from([1, 3, 16])),
        delay_s=draw(st.sampled_from([0.0, 0.002, 0.05])),
        noise=draw(st.sampled_from([0.0, 0.5])),
        seed=draw(st.integers(0, 1 << 32)),
        hand_back=draw(st.booleans()),
        hits=draw(st.sampled_from([0.0, 0.5])) if wayward else 0.0,
        lapses=draw(st.sampled_from([0.0, 0.3])) if wayward else 0.0,
        draft_kv_blocks=draw(st.integers(1, 200 // block_tokens)) if drafts else 0,
        sharing=sharing,
        rumours=rumours,
        settings={}
        if policy == "slackline"
        else {"chunk_tokens": str(draw(st.sampled_from([8, 64])))},
    )
    asks = []
    for _ in range(draw(st.integers(1, 12))):
        prompt = draw(st.integers(1, kv_tokens - 1))
        most = draw(st.integers(1, min(40, kv_tokens - prompt)))
        asks.append(
            Ask(
                after_s=draw(st.sampled_from([0.0, 1 / 64, 0.25])),
                prompt=prompt,
                max_tokens=most,
                output=draw(st.integers(1, most + 5)),
                slo=draw(SLOS),
                importance=draw(st.sampled_from([1.0, 10.0])),
                expires_s=draw(st.sampled_from([0.3, 3.0, 1e6, 1e6])),
                wait_s=draw(st.sampled_from([0.2, 1e6, 1e6])),
                best_effort=draw(st.sampled_from([False, False, True])),
                thinking=draw(st.none() | st.integers(0, most)),
            )
        )
    kinds = st.sampled_from(ACTS + (FAULTS if faults else []))
    act = st.builds(
        lambda at_s, what, who: Act(at_s=at_s, what=what, who=who),
        INSTANTS,
        kinds,
        st.integers(0, 11),
    )
    acts = draw(st.lists(act, max_size=8))
    return world, asks, acts


@given(schedules(policies=["fcfs", "edf", "qoserve"], faults=False))
def test_every_request_ends_once_with_its_tokens_while_messages_are_only_late(
    schedule: tuple[World, list[Ask], list[Act]],
) -> None:
    bench = Bench(*schedule)
    bench.run_all()
    assert bench.resyncs == 1, "nothing was lost, yet the picture was"


POLICIES = ["fcfs", "edf", "qoserve", "chaos"]  # chaos does whatever a policy may do
CONFUSED: dict[str, dict[str, Any]] = {
    "messages and planners are lost": {"policies": POLICIES[:3]},
    "a policy without sense": {"policies": ["chaos"]},
    "an engine finds prefixes or lacks room": {"policies": POLICIES, "wayward": True},
    # the engine of the bench fails where trees do not fit
    "draft KV is scarce": {"policies": ["chaos"], "drafts": True},
    "both": {"policies": ["chaos"], "wayward": True, "drafts": True},
    "requests share the draft's blocks": {"policies": ["chaos"], "drafts": True, "sharing": "held"},
    "and what others have left": {"policies": ["chaos"], "drafts": True, "sharing": "left"},
    "requests share what others have left": {"policies": POLICIES, "sharing": "left"},
    "a worker says wrongly what is kept": {"policies": POLICIES, "wayward": True, "rumours": True},
}


@pytest.mark.parametrize("world", CONFUSED.values(), ids=CONFUSED)
@given(data=st.data())
def test_every_request_ends_once_with_its_tokens_whatever_happens(
    data: st.DataObject, world: dict[str, Any]
) -> None:
    Bench(*data.draw(schedules(faults=True, **world))).run_all()


# An iteration of the bench takes 0.1 s at most, a message 0.05; two plans are under way at most.
CLOSE_S = 0.5


@given(schedules(policies=["fcfs", "edf", "slackline", "chaos"], faults=False))
def test_a_best_effort_request_has_its_first_token_in_the_time_that_its_tier_says_or_ends(
    schedule: tuple[World, list[Ask], list[Act]],
) -> None:
    bench = Bench(*schedule)
    bench.run_all()
    assert max(client.beyond_s for client in bench.clients.values()) < CLOSE_S


@given(schedules(policies=POLICIES, faults=True, sharing="held"))
def test_where_requests_share_blocks_no_more_is_promised_than_there_is(
    schedule: tuple[World, list[Ask], list[Act]],
) -> None:
    """Their prompts begin alike, and the table counts a block once as far as the worker has told.
    The engine has room for every entry of every plan, whoever leaves meanwhile.
    """
    bench = Bench(*schedule)
    bench.run_all()
    assert isinstance(bench.engine, SharingEngine) and bench.engine.lapsed == 0


def test_steps_do_not_look_cheaper_where_the_draft_finds_prompts_in_its_cache() -> None:
    """Requests of one prompt of 96 tokens. The engine takes the time that was predicted for each
    draft step, and none for the prompt but the first time.
    """
    world = World(
        policy="vllm", depth=2, kv_blocks=512, block_tokens=4, slots=16, delay_s=0.002,
        noise=0.0, seed=1, draft_kv_blocks=512, sharing="left", settings={"spec_tokens": "2"},
    )  # fmt: skip
    asks = [Ask(after_s=1 / 64, prompt=96, max_tokens=8, output=8, slo=Slo(ttlt_s=60.0))] * 60
    bench, steps = Bench(world, asks, []), list[float]()
    bench.watch = lambda view: steps.append(view.draft.step if view.draft is not None else 0.0)
    bench.run_all()
    assert bench.drafted > 100
    assert min(steps) > 0.97


def test_a_worker_that_left_and_came_back_keeps_what_it_is_given() -> None:
    """Its planner has still heard, a moment ago, that it leaves."""
    core = ReplicaCore(registry.make("fcfs", {}), profiles.load("a100-llama3-8b"), epoch=1)
    held = [decoding(slot, made.offer(f"t.{slot}", max_tokens=100_000), 5) for slot in range(3)]

    def released(now_unix_s: float) -> list[str]:
        actions = core.handle(Tick(), now_unix_s=now_unix_s)
        (plan,) = [action.plan for action in actions if isinstance(action, SendPlan)]
        return plan.released_why

    leaves = made.announce(context_tokens=200_000, kv_blocks=1000, leaves_unix_s=NOW + 0.2)
    core.handle(Synced(leaves, 1, 1, 0, held), now_unix_s=NOW)
    core.handle(Heartbeat(leaves, receivers=1), now_unix_s=NOW)
    assert set(released(NOW + 0.1)) == {"drained"}
    back = replace(leaves, incarnation="j", leaves_unix_s=None)
    core.handle(Synced(back, 2, 1, 0, held), now_unix_s=NOW + 1.0)
    assert released(NOW + 1.1) == []
