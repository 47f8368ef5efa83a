"""Tells which replicas, models and LoRA adapters live, by the digests that planners publish."""

import asyncio
from contextlib import suppress

from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import replace

from shared import subjects
from shared.bus.api import Bus, Call
from shared.clock import Clock
from shared.errors import BusError
from shared.features import STRUCTURED
from shared.rules.rules import Rules
from shared.schemas import Digest
from shared.vocabulary import ReplicaId

# A replica's digests come every 0.1 s, and what a gateway reads in them hardly ever changes. So it
# listens for a quarter of the time. `fresh_s` is two such rounds.
LISTEN_S, REST_S = 0.25, 0.75


class Model(Struct, frozen=True, kw_only=True):
    id: str
    created: int  # unix seconds
    object: str = "model"
    owned_by: str = "slackline"
    # tokens of prompt and answer that a replica of it has, as vLLM tells them
    max_model_len: int | UnsetType = UNSET
    parent: str | UnsetType = UNSET  # the model that a LoRA adapter adapts
    root: str | UnsetType = UNSET  # the model or adapter that an alias stands for
    # what not every engine can do, and replicas of it can (docs/http.md, "Body")
    features: list[str] | UnsetType = UNSET


class ModelList(Struct, frozen=True, kw_only=True):
    data: list[Model] = field(default_factory=list)
    object: str = "list"


class Fleet:
    """The fleet by its digests, dated by their arrival here: other hosts' clocks do not count."""

    def __init__(self, clock: Clock, fresh_s: float, rules: Rules) -> None:
        self._clock, self._rules = clock, rules
        self._fresh_s = fresh_s
        self._heard: dict[ReplicaId, tuple[float, Digest]] = {}
        self._first_heard_unix_s: dict[str, float] = {}  # by model and adapter

    def hear(self, digest: Digest) -> None:
        now_unix_s = self._clock.unix_s()
        self._heard[digest.replica] = (now_unix_s, digest)
        for name in (digest.model, *digest.adapters):
            self._first_heard_unix_s.setdefault(name, now_unix_s)

    def models(self) -> list[str]:
        """Models with a digest at most `fresh_s` old."""
        return sorted({digest.model for digest in self._fresh()})

    def listed(self) -> list[Model]:
        """All that a request may name: models, then adapters, then aliases of these. An alias goes
        before a model of the same name.
        """
        parents = {name: digest.model for digest in self._fresh() for name in digest.adapters}
        found = [self._told(name) for name in self.models()]
        found += [self._told(name, parent=parents[name]) for name in sorted(parents)]
        known = {model.id: model for model in found}
        aliases = [
            replace(known[name], id=alias, root=name)
            for alias, name in sorted(self._rules.models.aliases.items())
            if name in known
        ]
        hidden = {alias.id for alias in aliases}
        return [model for model in found if model.id not in hidden] + aliases

    def _told(self, name: str, parent: str | UnsetType = UNSET) -> Model:
        having = [digest for digest in self._fresh() if name in (digest.model, *digest.adapters)]
        return Model(
            id=name,
            created=int(self._first_heard_unix_s[name]),
            max_model_len=max((d.context_tokens for d in having), default=0) or UNSET,
            parent=parent,
            features=sorted({each for digest in having for each in digest.features}) or UNSET,
        )

    def accepting(self) -> bool:
        """Tells whether some live replica takes new requests."""
        return any(digest.accepting for digest in self._fresh())

    def context_tokens(self, name: str | None) -> int:
        """The longest context of a live replica of this model; 0 where none is told."""
        model = self.model_of(name)
        return max(
            (digest.context_tokens for digest in self._fresh() if digest.model == model), default=0
        )

    def meant(self, name: str | None) -> str:
        """The model or adapter that a request asks for; empty: no replica is alive."""
        return self._rules.models.meant(name) or next(iter(self.models()), "")

    def model_of(self, name: str | None) -> str:
        """The model that serves a request, which may name an alias, an adapter or nothing."""
        meant = self.meant(name)
        having = [digest.model for digest in self._fresh() if meant in digest.adapters]
        return meant if meant in self.models() else next(iter(having), meant)

    def knows(self, name: str) -> bool:
        """Tells whether a live replica has a model or an adapter of this name."""
        meant = self.meant(name)
        return any(meant in (digest.model, *digest.adapters) for digest in self._fresh())

    def names(self) -> list[str]:
        """The models and adapters that live replicas have, and their aliases."""
        return sorted(model.id for model in self.listed())

    def holds_formats(self, name: str | None) -> bool:
        """Tells whether some live replica of a model can hold an answer to a format."""
        model = self.model_of(name)
        return any(STRUCTURED in d.features for d in self._fresh() if d.model == model)

    def default_model(self) -> str:
        """The model's name where the client named none; empty where no replica is alive."""
        return self.meant(None)

    @property
    def several(self) -> bool:
        """True if the fleet has several models: questions about one must name it."""
        return len(self.models()) > 1

    def _fresh(self) -> list[Digest]:
        oldest_unix_s = self._clock.unix_s() - self._fresh_s
        self._heard = {
            replica: seen for replica, seen in self._heard.items() if seen[0] >= oldest_unix_s
        }
        return [digest for _, digest in self._heard.values()]


async def follow(fleet: Fleet, bus: Bus) -> None:
    """Keep the fleet up to date, until cancelled. While nothing is heard, it listens on."""
    heard = asyncio.Event()

    def on_digest(digest: Digest, _: Call) -> None:
        fleet.hear(digest)
        heard.set()

    while True:
        with suppress(BusError):  # the next round follows
            listening = await bus.subscribe(subjects.DIGESTS, Digest, on_digest)
            try:
                await asyncio.sleep(LISTEN_S)
                await heard.wait()
            finally:
                await listening.stop()
            heard.clear()
        await asyncio.sleep(REST_S)
