"""Tests of what the gateway tells of models: those that live, their adapters, and aliases."""

import asyncio
from random import Random
from typing import Any

from msgspec import UNSET

from services.gateway.api.alive import LISTEN_S, REST_S, Fleet, follow
from shared import subjects
from shared.features import STRUCTURED
from shared.rules.model_names import ModelNames
from shared.rules.rules import Rules
from shared.schemas import Digest
from shared.vocabulary import ReplicaId
from tests import made
from tests.simulated.bus import SimNet
from tests.simulated.virtual_loop import virtual


class Hand:
    """A clock that a test moves."""

    now = 100.0

    def unix_s(self) -> float:
        return self.now


def heard(names: ModelNames, *digests: dict[str, Any]) -> tuple[Fleet, Rules, Hand]:
    clock, rules = Hand(), Rules(models=names)
    fleet = Fleet(clock, 2.0, rules)  # type: ignore[arg-type]
    for n, more in enumerate(digests):
        fleet.hear(made.digest(f"r{n}", **more))
    return fleet, rules, clock


SMALL = {"model": "small", "context_tokens": 1000, "features": ["min_p"]}
LARGE = {"model": "large", "context_tokens": 9000, "features": [STRUCTURED], "adapters": ["poet"]}


def test_every_name_is_listed_with_context_and_features() -> None:
    aliases = {"best": "large", "verse": "poet", "gone": "nobody", "small": "large"}
    fleet, _, _ = heard(ModelNames(aliases=aliases), SMALL, SMALL | {"features": []}, LARGE)
    assert [
        (each.id, each.max_model_len, each.features, each.parent, each.root)
        for each in fleet.listed()
    ] == [
        ("large", 9000, [STRUCTURED], UNSET, UNSET),
        ("poet", 9000, [STRUCTURED], "large", UNSET),
        ("best", 9000, [STRUCTURED], UNSET, "large"),
        ("small", 9000, [STRUCTURED], UNSET, "large"),
        ("verse", 9000, [STRUCTURED], "large", "poet"),
    ]
    fleet, _, _ = heard(ModelNames(), SMALL, SMALL | {"features": []}, LARGE)
    small = fleet.listed()[1]
    assert (small.id, small.max_model_len, small.features) == ("small", 1000, ["min_p"])


def test_a_request_is_for_the_model_that_its_name_leads_to() -> None:
    names = ModelNames(default="best", aliases={"best": "large", "verse": "poet"})
    fleet, rules, clock = heard(names, SMALL, LARGE)
    asked = (None, "best", "verse", "poet", "small", "other")
    assert [fleet.model_of(name) for name in asked] == ["large"] * 4 + ["small", "other"]
    assert [fleet.holds_formats(name) for name in asked] == [True] * 4 + [False, False]
    assert [fleet.knows(name) for name in asked if name] == [True] * 4 + [False]
    assert fleet.default_model() == "large"
    rules.take(Rules(models=ModelNames(aliases={"best": "small"})))
    assert (fleet.model_of("best"), fleet.knows("verse")) == ("small", False)
    clock.now += 3.0
    assert (fleet.listed(), fleet.several, fleet.knows("small")) == ([], False, False)


class Counted(Fleet):
    """Counts the digests that it hears."""

    heard = 0

    def hear(self, digest: Digest) -> None:
        self.heard += 1
        super().hear(digest)


@virtual()
async def test_a_gateway_listens_a_quarter_of_the_time_and_knows_who_comes_and_goes() -> None:
    net, replicas = SimNet(Random(0)), set[str]()
    planner = net.connect("planner")
    fleet = Counted(net.clock, 2.0, Rules())

    async def tell() -> None:
        while True:
            for name in sorted(replicas):
                await planner.publish(
                    subjects.digest(ReplicaId(name)), made.digest(name, model=name)
                )
            await asyncio.sleep(0.1)

    tasks = [asyncio.create_task(each) for each in (tell(), follow(fleet, net.connect("gateway")))]
    await asyncio.sleep(10.2)
    assert fleet.models() == []
    replicas |= {"r1", "r2"}
    await asyncio.sleep(0.2)  # it listened all the time, since nobody was there
    assert fleet.models() == ["r1", "r2"]
    began = fleet.heard
    for _ in range(100):
        await asyncio.sleep(0.1)
        assert fleet.models() == ["r1", "r2"]
    assert 0.2 < (fleet.heard - began) / (2 * 100) < 0.32
    replicas.add("r3")
    await asyncio.sleep(LISTEN_S + REST_S + 0.1)
    assert fleet.models() == ["r1", "r2", "r3"]
    replicas.discard("r1")
    await asyncio.sleep(2.1)
    assert fleet.models() == ["r2", "r3"]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
