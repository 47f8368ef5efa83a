"""Tests of the profile (iteration times) that a worker announces: how it travels and is used."""

import asyncio
import math
import os
import random
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from services.worker import service as worker
from shared.bus import codec
from shared.core.announced import as_announced, profile_of
from shared.errors import ConfigError, PeerError
from shared.perf.forms import Attention, PiecewiseTokens, TokenTable
from shared.perf.profile_file import ProfileFile
from shared.schemas import Announce
from tests import made
from tests.fleet.protocol.scene import CALM, Scene
from tests.fleet.protocol.world import World
from tests.shared.perf.timings import FITTED, drawn
from tests.simulated.virtual_loop import virtual

QUIET = True  # tests/conftest.py reads it: services log next to nothing


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
