"""A profile that its worker announces: how it travels, and how a fleet plans by it."""

import asyncio
import functools
import math
import os
import random
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from services.worker import service as worker
from shared import subjects
from shared.bus import codec
from shared.bus.api import Call
from shared.core.announced import as_announced, profile_of
from shared.errors import ConfigError, PeerError
from shared.perf.forms import Attention, PiecewiseTokens, TokenTable
from shared.perf.iteration_time import Profile
from shared.perf.profile_file import ProfileFile
from shared.schemas import Announce
from shared.telemetry import conventions as names
from shared.telemetry.exposition import exposition
from shared.telemetry.instruments import Registry
from shared.vocabulary import ReplicaId
from tests import made
from tests.fleet.protocol.scene import CALM, Scene
from tests.fleet.protocol.world import World
from tests.rings import slow_but
from tests.shared.perf.timings import FITTED, drawn
from tests.simulated.virtual_loop import virtual

QUIET = True


def announce(fitted: ProfileFile | None, profile: str = "cpu-tiny") -> Announce:
    return made.announce(
        incarnation="1",
        engine="torch",
        profile=profile,
        kv_blocks=64,
        context_tokens=512,
        fitted=fitted,
    )


def test_an_announced_fit_arrives_as_it_was_and_is_about_a_kilobyte() -> None:
    payload = msgspec.msgpack.encode(announce(FITTED))
    assert len(payload) < 1400
    arrived = msgspec.msgpack.decode(payload, type=Announce)
    shapes = drawn(random.Random(2), 50)
    assert [profile_of(arrived).batch_s(s) for s in shapes] == [
        FITTED.profile().batch_s(s) for s in shapes
    ]


def test_without_a_fit_the_name_counts() -> None:
    assert profile_of(announce(None)).name == "cpu-tiny"
    with pytest.raises(ConfigError, match="no profile named"):
        profile_of(announce(None, "none-such"))


def test_a_path_is_not_opened_and_its_worker_announces_the_profile_itself(tmp_path: Path) -> None:
    fifo = tmp_path / "profile.json"
    os.mkfifo(fifo)  # whoever opened it would wait for ever
    with pytest.raises(ConfigError, match="no profile named"):
        profile_of(announce(None, str(fifo)))
    own = tmp_path / "own.json"
    own.write_bytes(msgspec.json.encode(FITTED))
    assert as_announced(str(own)) == (FITTED.name, FITTED)
    assert as_announced("cpu-tiny") == ("cpu-tiny", None)


FORM = FITTED.coefficients
assert isinstance(FORM, PiecewiseTokens)
NOTHING = Attention(e=0.0, p1=0.0, p2=0.0, d0=0.0, d1=0.0, d2=0.0)
NONSENSE = {
    "no time at all": replace(
        FITTED,
        coefficients=PiecewiseTokens(tile=1, knots=(0,), slopes=(0.0,), c=-1.0, attention=NOTHING),
    ),
    "not a number": replace(FITTED, coefficients=replace(FORM, c=math.nan)),
    "not a number, hidden": replace(
        FITTED, coefficients=replace(FORM, attention=replace(FORM.attention, p1=math.nan))
    ),
    "endless": replace(
        FITTED, coefficients=replace(FORM, attention=replace(FORM.attention, d1=math.inf))
    ),
    "endless drafts": replace(
        FITTED, coefficients=replace(FORM, attention=replace(FORM.attention, v=1e300))
    ),
    "a year": replace(FITTED, overhead_s=3e7),
    "as long as a book": replace(FITTED, provenance=20_000 * "a"),
    "many knots": replace(
        FITTED, coefficients=replace(FORM, knots=tuple(range(1000)), slopes=(0.0,) * 1000)
    ),
    "a wide tile": replace(FITTED, coefficients=replace(FORM, tile=2**62)),
    # two points, and a million between them
    "a long table": replace(
        FITTED,
        coefficients=TokenTable(
            table_tokens=(0, 1_000_000), table_seconds=(0.1, 0.2), attention=NOTHING
        ),
    ),
}


@pytest.mark.parametrize("kind", NONSENSE)
def test_a_fit_that_no_worker_would_send_is_refused(kind: str) -> None:
    sent = msgspec.msgpack.encode(announce(NONSENSE[kind]))
    with pytest.raises((PeerError, ConfigError)):
        profile_of(codec.decode(Announce, sent, json=False))


def test_a_fit_that_is_refused_is_not_unfolded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request may ask for it."""
    unfolded: list[ProfileFile] = []
    profile = ProfileFile.profile

    def counted(file: ProfileFile) -> Profile:
        unfolded.append(file)
        return profile(file)

    monkeypatch.setattr(ProfileFile, "profile", counted)
    endless = replace(FITTED, name="endless", overhead_s=3e7)
    for _ in range(3):
        with pytest.raises(ConfigError, match="no durations"):
            profile_of(announce(endless))
    assert len(unfolded) == 1


def metrics_of(registry: Registry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = text_string_to_metric_families(exposition([registry], "")[1])
    return {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in families
        for s in family.samples
    }


@pytest.mark.parametrize("seed", slow_but([0], range(3)))
@virtual()
async def test_a_fleet_plans_by_what_its_workers_fitted_and_a_worker_that_was_fenced_keeps_its_fit(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker is paused until it is declared lost; a stranger announces fits that are none all
    the time.
    """
    announced: dict[str, list[Announce]] = {}
    registries = [Registry(), Registry()]
    serve, given = worker.serve, iter(registries)
    fitted = replace(FITTED, name="fitted-here")

    async def with_fit(*args: object, **kwargs: object) -> None:
        args[3].fitted = fitted  # type: ignore[attr-defined]
        served = functools.partial(serve, metrics=next(given))  # type: ignore[arg-type]
        await served(*args, **kwargs)

    monkeypatch.setattr(worker, "serve", with_fit)

    def heard(one: Announce, _: Call) -> None:
        announced.setdefault(one.replica, []).append(one)

    async def disturb(world: World) -> None:
        await asyncio.sleep(1.0)
        world.processes["worker-r0"].pause()
        for kind in NONSENSE.values():
            await asyncio.sleep(1.0)
            stranger = replace(announce(kind), replica=ReplicaId("x1"), incarnation="stranger")
            world.net.inject(
                subjects.announce(ReplicaId("x1")), msgspec.msgpack.encode(stranger), {}
            )
        world.processes["worker-r0"].resume()

    world = World(
        Scene(faults=CALM, kills=0, pauses=0, restarts=0, cancels=0, planners=1, requests=20),
        seed,
    )
    await world.net.connect("watch").subscribe(subjects.ANNOUNCEMENTS, Announce, heard)
    disturbed = asyncio.ensure_future(disturb(world))
    await world.play()
    await disturbed
    ours = [one for replica in ("r0", "r1") for one in announced[replica]]
    assert {(one.profile, one.fitted) for one in ours} == {("fitted-here", fitted)}
    assert len({one.incarnation for one in announced["r0"]}) > 1, f"seed {seed}: it was not fenced"
    counted = [metrics_of(registry) for registry in registries]
    made = sum(len(seen.tokens) for seen in world.seen.values())
    r0, r1 = (("replica", "r0"),), (("replica", "r1"),)
    generated = sum(
        one[names.GENERATION_TOKENS, (("model_name", "m"), *replica)]
        for one, replica in zip(counted, (r0, r1), strict=True)
    )
    assert generated >= made > 0  # what a lost worker made last is made again
    for one, replica in zip(counted, (r0, r1), strict=True):
        assert one[names.FIT_ERROR, (("regime", "all"), *replica)] == fitted.error.mape
        assert one[names.HELD_REQUESTS, replica] == 0
        assert one[f"{names.ITERATION}_count", replica] > 0
        assert one[names.KV_FREE_BLOCKS, replica] == 400
    planned = metrics_of(world.planners[0].metrics)
    for name in ("r0", "r1"):
        label = ("replica", name)
        assert planned[names.ACKS, (label,)] > 0
        assert planned[names.RESIDUAL, (label,)] >= 0
        assert (
            1 / 16 <= planned[names.GAMMA, tuple(sorted((label, ("regime", "decode_only"))))] <= 16
        )
    assert sum(planned[names.PLANS, (("replica", r),)] for r in ("r0", "r1")) >= made / 32


@virtual()
async def test_a_seat_is_taken_anew_when_the_worker_measured_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that comes back at once with another fit is planned by that fit."""
    files = iter([FITTED, replace(FITTED, name="fitted-again")])
    serve, seats = worker.serve, list[str]()

    async def with_fit(*args: object, **kwargs: object) -> None:
        args[3].fitted = next(files)  # type: ignore[attr-defined]
        await serve(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(worker, "serve", with_fit)
    world = World(
        Scene(
            faults=CALM,
            kills=0,
            pauses=0,
            restarts=0,
            cancels=0,
            planners=1,
            replicas=1,
            requests=10,
        ),
        1,
    )

    async def restart() -> None:
        await asyncio.sleep(1.0)
        seats.append(next(iter(world.planners[0]._planners.values())).core._learned.profile.name)
        world.processes["worker-r0"].kill()
        await asyncio.sleep(8.0)
        seats.append(next(iter(world.planners[0]._planners.values())).core._learned.profile.name)

    restarted = asyncio.ensure_future(restart())
    await world.play()
    await restarted
    assert seats == ["mine", "fitted-again"]
