"""Tests of the protocol between services, by thousands of seeded simulated schedules: messages are
lost, doubled, reordered and delayed, processes killed, paused and resumed, brokers restarted. After
each, no request is lost or doubled (tests/fleet/protocol/world.py has the checks).

SLACKLINE_SCHEDULES sets how many (make soak runs ten thousand, make test the first 150); a failing
seed is printed, and `run(seed, scene)` replays it, to the last message.
"""

import os

import pytest

from services.worker.ack_writer import AckWriter
from tests.fleet.protocol.scene import CALM, Scene
from tests.fleet.protocol.world import World, run
from tests.rings import slow_but
from tests.simulated.virtual_loop import virtual

QUIET = True  # tests/conftest.py reads it: services log next to nothing

SCHEDULES = int(os.environ.get("SLACKLINE_SCHEDULES", "250"))
BLOCK = 25
FAST_BLOCKS = 6

SCENES = {
    "qoserve": Scene(),
    "fcfs": Scene(policy="fcfs"),
    "edf under memory pressure": Scene(policy="edf", kv_blocks=120, requests=20, max_slots=8),
    "one of each": Scene(replicas=1, planners=1, admissions=1, relegations=1, kills=4),
    "speculation": Scene(policy="vllm", settings={"spec_tokens": "3"}, kv_blocks=160),
    "many deaths": Scene(replicas=3, kills=8, pauses=4, over_s=4.0),
    "clocks off by a second": Scene(skew_s=1.0),
    "slow acks": Scene(acks="slow"),
    "wrong acks": Scene(acks="wrong"),
    "a full disk": Scene(full_s=3.0),
    "prefixes": Scene(prefixes=True, requests=20, policy="slackline"),
    "prefixes under memory pressure": Scene(
        prefixes=True, kv_blocks=120, requests=20, max_slots=8, kills=5
    ),
    "apart": Scene(
        replicas=4, roles=("prefill", "decode"), prefixes=True, requests=20, policy="slackline"
    ),
    "apart or together, over links that break": Scene(
        replicas=3, roles=("prefill", "both"), prefixes=True, requests=20, kills=6, breaks=0.2
    ),
}


@pytest.mark.parametrize("block", slow_but(range(FAST_BLOCKS), range(max(SCHEDULES // BLOCK, 1))))
def test_every_request_ends_once_with_its_own_tokens_whatever_happens(block: int) -> None:
    names = sorted(SCENES)
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        run(seed, SCENES[names[seed % len(names)]])


@pytest.mark.parametrize(
    ("seed", "scene"),
    [
        (89, "wrong acks"),  # an ack of more than was planned: its request was never planned again
        (20_770, "a full disk"),  # a paused admission ran the copy of a refused request
        (62_760, "a full disk"),  # a cancel came while its request was being stored
        (67_343, "fcfs"),  # one copy of a request was refused as unattainable, the other ran
        (40_754, "many deaths"),  # a late copy of a hold took in again what was over
        (1_098, "speculation"),  # an output in doubt was deleted before its write arrived
        (30_448, "speculation"),  # of two copies of a hold one was declined, the other taken in
    ],
)
def test_a_schedule_that_once_broke_does_not(seed: int, scene: str) -> None:
    run(seed, SCENES[scene])


def test_without_misfortune_nothing_is_moved_and_nothing_is_lost() -> None:
    for seed in range(10):
        world = run(
            seed, Scene(faults=CALM, kills=0, pauses=0, restarts=0, cancels=0, policy="fcfs")
        )
        ends = [seen.ends[0] for seen in world.seen.values() if not seen.refused]
        assert len(ends) > 6
        assert all(end.verdict.attempts == 1 for end in ends)


def test_planners_know_what_engines_keep_after_any_schedule() -> None:
    """The final check compares them for every prompt."""
    found = [run(seed, Scene(prefixes=True, requests=20)).found_tokens for seed in range(10)]
    assert sum(tokens > 0 for tokens in found) > 5


def test_requests_are_handed_over_with_their_kv() -> None:
    """In calm each goes on at another replica, if it has more than a token to make."""
    apart = Scene(
        faults=CALM, kills=0, pauses=0, restarts=0, cancels=0, replicas=4, requests=20,
        roles=("prefill", "decode"), prefixes=True, policy="slackline",
    )  # fmt: skip
    handed_over = moved_tokens = 0
    for seed in range(5):
        world = run(seed, apart)
        moved_tokens += world.links.moved_tokens
        verdicts = [seen.ends[0].verdict for seen in world.seen.values() if not seen.refused]
        handed_over += sum(
            verdict.attempts == 2 and verdict.replica in ("r1", "r3") for verdict in verdicts
        )
    assert handed_over > 40
    assert moved_tokens > 10_000


def test_a_request_whose_record_is_deleted_ends_and_its_client_is_told() -> None:
    """The final check looks at every verdict, and at every attempt."""
    deleted = 0
    for seed in range(20):
        world = run(seed, Scene(faults=CALM, kills=0, pauses=0, restarts=0, cancels=0, deletions=6))
        deleted += len(world.deleted)
    assert deleted > 30


def test_requests_come_only_to_replicas_that_have_what_they_need_however_often_they_are_moved() -> (
    None
):
    """The final check looks at every replica that held a request."""
    moved = 0
    for seed in range(20):
        world = run(seed, Scene(replicas=3, able=("r1", "r2"), kills=5, pauses=0, restarts=0))
        moved += sum(
            seen.ends[0].verdict.attempts > 1
            for name, seen in world.seen.items()
            if world.requests[name].sampling.min_p and not seen.refused
        )
    assert moved > 20


@virtual()
async def test_a_body_and_an_output_that_no_record_names_are_deleted() -> None:
    calm = Scene(faults=CALM, kills=0, pauses=0, restarts=0, cancels=0, requests=3)
    world = World(calm, seed=1)
    for bucket, name in ((world.net.bodies, "default.nobody.0"), (world.net.requests, "o.x")):
        bucket.create(name, b"", None, now_s=world.net.loop.time())
    await world.play()  # waits until nothing is left
    assert world.net.bodies.get("default.nobody.0", now_s=world.net.loop.time()) is None
    assert world.net.requests.get("o.x", now_s=world.net.loop.time()) is None


def _fails_somewhere(seeds: range, scene: Scene) -> bool:
    for seed in seeds:
        try:
            run(seed, scene)
        except AssertionError:
            return True
    return False


# The simulation is worth what it catches: each of these tests breaks one rule of the protocol on
# purpose.


def test_the_simulation_notices_a_replica_that_is_not_fenced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def not_fenced(self: AckWriter) -> bool:
        return False

    async def append_anyway(self: AckWriter, entry: object) -> None:
        last = await self._last()
        self._last_seq = 0 if last is None else last[0]
        await appended(self, entry)  # type: ignore[arg-type]

    appended = AckWriter._append
    monkeypatch.setattr(AckWriter, "fenced", not_fenced)
    monkeypatch.setattr(AckWriter, "_append", append_anyway)
    assert _fails_somewhere(range(300), Scene(pauses=8, kills=0, restarts=0, requests=20))
